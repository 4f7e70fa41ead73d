"""The HTTP server: routes, access rules and the queue, and the process that runs the engine."""
