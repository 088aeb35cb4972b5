"""Who there is and what they may do: organisations, projects, members, service accounts, API keys."""
