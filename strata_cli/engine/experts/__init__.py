"""Where each expert's weights live, and how they get to the device."""
