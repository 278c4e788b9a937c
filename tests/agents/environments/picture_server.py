"""A server of MCP on standard input and output, with a tool that returns a text and a picture."""

import io

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from PIL import Image as Pictures

server = MCPServer("pictures")


@server.tool()
def look(side: int) -> list:
    """Shows a picture."""
    file = io.BytesIO()
    Pictures.new("RGB", (side, side), "red").save(file, "PNG")
    return [f"{side} pixels", Image(data=file.getvalue(), format="png")]


server.run()
