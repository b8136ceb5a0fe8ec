"""The web UI and the HTTP API: the same verbs as the command line. Needs the `web` extra."""
