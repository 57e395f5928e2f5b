"""The larger parts of a server, each made from its settings; `service.app` puts them together."""
