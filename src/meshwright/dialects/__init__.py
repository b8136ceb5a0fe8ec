"""Other frameworks' config languages: read, to check them, and written, to run there."""
