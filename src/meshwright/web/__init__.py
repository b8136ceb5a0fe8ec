"""The page and its JSON API: the same verbs as the command line, answered over HTTP. Needs the `web` extra."""
