"""Turn links to repository files outside docs/ into plain names, for mkdocs."""

import re

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Name the file where the text does not."""
    return OUTSIDE.sub(lambda at: at[1] if at[2] in at[1] else f"{at[1]} (`{at[2]}`)", markdown)
