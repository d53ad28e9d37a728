"""Identity keys, certificates, and signatures of announcements, routes and messages of averaging rounds."""
