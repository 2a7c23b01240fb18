"""All generated pages at once.

python tools/docs.py --write    # write the pages that are stale
python tools/docs.py --check    # status 1 if one is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import cases, features, multicast, products, reference, sentences
from tools.pages import main

PAGES = (*cases.PAGES, *features.PAGES, *multicast.PAGES, *products.PAGES, *reference.PAGES, *sentences.PAGES)

if __name__ == "__main__":
    main(PAGES)
