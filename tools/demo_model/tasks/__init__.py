"""Families of decision prompts and chats, drawn at random from the prepared tables."""
