"""Keys, certificates, and what is signed with them: announcements, routes, entries, pieces."""
