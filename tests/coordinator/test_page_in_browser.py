"""The page as a real browser shows it: no wider than the window, nothing refused, and the token kept secret."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from lightning_bytescheduler.serving import ServerAccess
from tests.coordinator.browser import CHROMIUM, Tab, browser
from tests.coordinator.made_up_status import made_up_status
from tests.coordinator.test_status import SECRET, served

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"), pytest.mark.slow]
EVIL = "<img src=x onerror=document.title='evil'>"


async def until(tab: Tab, expression: str) -> None:
    for _ in range(150):
        if await tab.value(expression):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{expression} did not come true; the page says {await tab.value('document.body.innerText')}")


def test_it_fits_and_shows_names_as_text():
    status = made_up_status(12)
    worker = msgspec.structs.replace(status.workers[1], name=EVIL + "x" * 150)
    status = msgspec.structs.replace(status, workers=(status.workers[0], worker, *status.workers[2:]))

    async def look(url):
        async with browser(url) as tab:
            await until(tab, "document.querySelectorAll('#workers tr').length === 12")
            for width in (1280, 400):
                for scheme in ("light", "dark"):
                    await tab.size(width)
                    await tab.colours(scheme)
                    await tab.value("new Promise(done => setTimeout(done, 200))")
                    wide = await tab.value("[document.documentElement.scrollWidth, innerWidth]")
                    assert wide == [width, width]
                    cut = "[...document.querySelectorAll('main *')].filter(one => one.getBoundingClientRect().right"
                    assert await tab.value(f"{cut} > innerWidth && !one.closest('thead')).length") == 0
            assert await tab.value("document.querySelectorAll('#timeline rect').length") == 4 * 12 * 4
            assert (
                len((await tab.value("document.querySelector('#loss polyline').getAttribute('points')")).split()) == 40
            )
            assert EVIL in await tab.value("document.getElementById('workers').innerText")
            assert await tab.value("document.title") == "Round 41 – coordinator"
            return tab.said

    with served(status) as url:
        said = asyncio.run(look(url))
    assert said == []


def test_it_asks_for_the_token_and_keeps_it_to_itself():
    async def look(url):
        async with browser(url) as tab:
            await until(tab, "document.getElementById('ask')?.hidden === false")
            assert await tab.value("document.getElementById('all').hidden")
            enter = "document.getElementById('token').value = {}; document.getElementById('ask').requestSubmit()"
            await tab.value(enter.format(json.dumps("wrong")))
            await until(tab, "document.getElementById('said').textContent === 'That is not its token.'")
            await tab.value(enter.format(json.dumps(SECRET)))
            await until(tab, "!document.getElementById('all').hidden")
            assert await tab.value("document.getElementById('ask').hidden")
            kept = await tab.value("[document.cookie, JSON.stringify({...localStorage}), location.href]")
            assert SECRET not in str(kept)
            assert SECRET not in await tab.value("document.documentElement.outerHTML")
            assert await tab.value("document.getElementById('token').value") == ""

    with served(made_up_status(), ServerAccess(token=SECRET)) as url:
        asyncio.run(look(url))
