"""The verbs as tools for coding agents, over the Model Context Protocol. Serving them needs the `mcp` extra."""
