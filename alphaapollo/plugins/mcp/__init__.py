"""Tools of MCP servers: `env.mcp_servers`."""
