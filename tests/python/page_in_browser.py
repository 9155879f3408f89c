"""Opens the page of an agent, or a report, in a real Chromium, and prints what a reader sees as JSON.

URL, and `live` for a page whose numbers must change, `withheld` for one that also has no texts of jobs, or `still`.
"""

import json
import shutil
import sys

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

url, kind = sys.argv[1:3]
browsers = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
chromium = next(filter(None, map(shutil.which, browsers)), None)
if chromium is None:
    print(json.dumps({"missing": "Chromium"}))
    sys.exit()

seen = {"errors": [], "requests": [], "violations": [], "bytes": 0}
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    for scheme in ["light", "dark"]:
        page = browser.new_page(color_scheme=scheme)
        page.on("console", lambda message: seen["errors"].append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: seen["errors"].append(str(error)))
        page.on("request", lambda request: seen["requests"].append(request.url))
        size = 0

        def count(response):
            global size
            if "/v1/" not in response.url and response.url.startswith(("http", "file")):
                size += len(response.body())

        page.on("response", count)
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        page.wait_for_selector("#incidents details")
        incident = page.locator("#incidents details.bad-edge").first
        if incident.get_attribute("open") is None:
            incident.locator("summary").click()
        evidence = "withheld" if kind == "withheld" else "Evidence"
        page.locator("#incidents pre", has_text=evidence).first.wait_for()
        if kind != "still":
            step = page.locator("#jobs tbody td:nth-child(3)").first
            expect(step).not_to_have_text(step.inner_text(), timeout=60_000)
        seen["bytes"] = max(seen["bytes"], size)
        results = Axe().run(page)
        seen["violations"] += [f"{scheme}: {of['id']}: {of['nodes'][0]['html']}" for of in results.response["violations"]]
        paints = page.evaluate("performance.getEntriesByType('paint').map(of => [of.name, of.startTime])")
        seen["paints"] = dict(paints)
        for part in ["jobs", "causes", "ranks", "incidents", "bars", "facts", "components"]:
            seen[part] = page.locator(f"#{part}").inner_text()
        seen["map"] = page.locator("#map").is_visible()
        if len(sys.argv) > 3:
            page.screenshot(path=f"{sys.argv[3]}-{scheme}.png", full_page=True)
        page.close()
    browser.close()
print(json.dumps(seen))
