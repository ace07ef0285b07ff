"""The page "All metrics" of the site: its links, keys and rows."""

from __future__ import annotations

from alphaapollo.config.metrics import list_metrics
from scripts.docs_site import ROOT
from scripts.metric_page import render_page
from tests.unit.test_docs import LINK, list_anchors, unknown_names


def test_links_and_keys_of_the_page_exist() -> None:
    page = render_page()
    links = [(ROOT / "docs" / name, anchor) for name, anchor in LINK.findall(page)]
    assert len(links) > 10
    assert [link for link in links if not link[0].is_file() or (link[1] and link[1] not in list_anchors(link[0]))] == []
    assert unknown_names(page) == []


def test_every_metric_has_a_place() -> None:
    page = render_page()
    assert [metric.name for metric in list_metrics() if f"`{metric.name}`" not in page] == []
    assert "| `actor/grad_norm`, `actor/grad_norm_max` | norm | gradient norm" in page
    assert "| `val/accuracy<pass>` ↑ | share |" in page and "`train/loss` ↓" in page
