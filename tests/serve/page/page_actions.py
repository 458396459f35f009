"""What tests do on the web page."""

import base64
import json

from browser import Browser


def give(page: Browser, event: str, *images: bytes, name: str = "image.png", kind: str = "image/png") -> None:
    """Drop or paste files, as a script does it."""
    transfer = "clipboardData" if event == "paste" else "dataTransfer"
    constructor = "ClipboardEvent" if event == "paste" else "DragEvent"
    page.run(
        f"""(() => {{
          const {transfer} = new DataTransfer();
          for (const text of {json.dumps([base64.b64encode(image).decode() for image in images])}) {{
            const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
            {transfer}.items.add(new File([bytes], {json.dumps(name)}, {{type: {json.dumps(kind)}}}));
          }}
          const options = {{{transfer}, bubbles: true, cancelable: true}};
          document.getElementById('drop').dispatchEvent(new {constructor}({json.dumps(event)}, options));
        }})()"""
    )


def classes(page: Browser) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('.predictions .label')].map((one) => one.textContent)")
    return found
