"""An OpenAI-compatible server: scheduling of requests, the HTTP application, a page, and a Ray Serve deployment."""
