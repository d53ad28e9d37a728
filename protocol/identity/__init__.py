"""Identity keys, certificates, and signatures of announcements, routes, entries and pieces."""
