"""How people reach what runs in their units: ports and commands, over the tunnels that nodes keep open."""
