//! Accessibility and robustness of the pages in a browser: keyboard, narrow windows, dark mode, and
//! an unavailable service.

use std::time::Duration;

use serde_json::json;

use super::{
    browser::{Browser, in_browser},
    service::Example,
};
use crate::support::eventually;

// The keys of WebDriver.
const TAB: &str = "\u{e004}";
const ENTER: &str = "\u{e007}";
const SHIFT: &str = "\u{e008}";
const ESCAPE: &str = "\u{e00c}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_is_usable_with_a_keyboard_alone() {
    let example = Example::start().await;
    example.acquire("sku-1", "worker-a", 600_000).await;
    example.acquire("sku-2", "worker-b", 600_000).await;
    let focus = async |browser: &Browser| {
        let script = "const at = document.activeElement; return at.id || at.getAttribute('aria-label') || at.textContent";
        browser.run(script).await.as_str().unwrap().to_owned()
    };
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.has_rows("leases", 2).await;
        let mut passed = vec![];
        while focus(browser).await != "Break the lease on sku-1" {
            browser.press(TAB).await;
            passed.push(focus(browser).await);
            assert!(passed.len() < 20, "{passed:?}");
            let outline = "return getComputedStyle(document.activeElement).outlineStyle";
            assert_ne!(browser.run(outline).await, "none", "the focus is not visible: {passed:?}");
        }
        assert_eq!(passed[0], "Skip to the leases");
        assert!(passed.iter().any(|name| name == "leases-text"), "{passed:?}");
        // Enter (on the default button) and Escape cancel the question, and the focus returns.
        for key in [ENTER, ESCAPE] {
            browser.press(ENTER).await;
            assert_eq!(focus(browser).await, "break-no");
            browser.press(key).await;
            eventually!("the focus is back", focus(browser).await == "Break the lease on sku-1");
        }
        // The focus stays while the rows are refreshed.
        example.acquire("sku-0", "worker-c", 600_000).await;
        browser.shows("#leases-rows", "sku-0").await;
        assert_eq!(focus(browser).await, "Break the lease on sku-1");

        browser.press(ENTER).await;
        browser.press(&[SHIFT, TAB].concat()).await;
        assert_eq!(focus(browser).await, "break-yes");
        browser.press(ENTER).await;
        // The focused element no longer exists, so the focus moves to its table.
        eventually!("the focus is on the leases", focus(browser).await == "leases-title");
        assert!(!browser.text("#leases-rows").await.contains("sku-1"));
        let unnamed = "return [...document.querySelectorAll('button, input, select, svg, table, section, dialog, ol')] \
             .filter((one) => !(one.textContent.trim() || one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') \
                 || one.labels?.length)).map((one) => one.outerHTML)";
        assert_eq!(browser.run(unnamed).await, json!([]));
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_narrow_window_needs_no_scrolling_to_the_side() {
    let example = Example::start().await;
    let long = "W".repeat(255);
    example.acquire(&long, &long, 600_000).await;
    let (first, _) = example.late_holder("sku-1").await;
    example.refuses(&first, 1, 412, "stale-token").await;
    in_browser(async |browser| {
        for width in [360, 700, 1000] {
            browser.resize(width, 740).await;
            for page in [example.console(), example.service.url("/")] {
                browser.goto(&page).await;
                browser.comes_to("return document.readyState === 'complete'").await;
                if page.ends_with("/console/") {
                    browser.has_rows("leases", 2).await;
                    browser.shows("#live-events", "holds it now").await;
                    // Only refusals that occur while the page is open are announced.
                    assert_eq!(browser.text("#live-announce").await, "");
                }
                let wide = "return [...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right \
                     > innerWidth + 1 && one.getClientRects().length > 0 && !one.closest('svg')).map((one) => one.className || one.tagName)";
                assert_eq!(browser.run(wide).await, json!([]), "{page} at {width}");
                let scrolls = "return document.scrollingElement.scrollWidth";
                assert!(browser.run(scrolls).await.as_u64().unwrap() <= width.into());
            }
        }
        browser.resize(360, 740).await;
        browser.goto(&example.console()).await;
        browser.click("#leases-rows tr:nth-child(2) th button").await;
        browser.shows("#look-up-facts", "holds it now").await;
        let right = "return document.querySelector('#look-up').getBoundingClientRect().right";
        assert!(browser.run(right).await.as_f64().unwrap() <= 360.0);
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

/// A script that returns the lowest contrast of a visible text with its background, as WCAG defines
/// it.
const LOWEST_CONTRAST: &str = "
    const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
        .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
        .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
    const parts = (color) => color.match(/[0-9.]+/g).map(Number);
    const behind = (one) => {
        for (let at = one; at; at = at.parentElement) {
            const [r, g, b, a = 1] = parts(getComputedStyle(at).backgroundColor);
            if (a === 1) return [r, g, b];
        }
        return [255, 255, 255];
    };
    let lowest = [21, ''];
    for (const one of document.querySelectorAll('body *:not(svg *)')) {
        const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || one.disabled || one.ariaDisabled === 'true' || one.getClientRects().length === 0) continue;
        const [a, b] = [light(parts(getComputedStyle(one).color)), light(behind(one))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < lowest[0]) lowest = [contrast, one.outerHTML];
    }
    return lowest";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_follows_the_colour_scheme_with_enough_contrast() {
    let example = Example::start().await;
    let (first, _) = example.late_holder("sku-1").await;
    example.refuses(&first, 1, 412, "stale-token").await;
    in_browser(async |browser| {
        for page in [example.console(), example.service.url("/")] {
            let mut grounds = vec![];
            for scheme in ["light", "dark"] {
                browser.prefer("prefers-color-scheme", scheme).await;
                browser.goto(&page).await;
                if page.ends_with("/console/") {
                    browser.shows("#live-events", "holds it now").await;
                    let name = format!("console-{scheme}.png");
                    browser.picture(&name, 1200, 920).await;
                }
                let ground = "return getComputedStyle(document.body).backgroundColor";
                let ground = browser.run(ground).await;
                grounds.push(ground.as_str().unwrap().to_owned());
                let lowest = browser.run(LOWEST_CONTRAST).await;
                let contrast = lowest[0].as_f64().unwrap();
                assert!(contrast >= 4.5, "{page}, {scheme}: {lowest}");
            }
            assert_ne!(grounds[0], grounds[1]);
        }
        browser.prefer("prefers-reduced-motion", "reduce").await;
        browser.goto(&example.console()).await;
        browser.has_rows("leases", 1).await;
        let moves = "return getComputedStyle(document.querySelector('.fill')).transitionDuration";
        assert_eq!(browser.run(moves).await, "0s");
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

/// Starts the service again at this URL, and waits until the page has reconnected.
async fn restarted(browser: &Browser, url: &str) -> Example {
    let addr = url.strip_prefix("http://").unwrap();
    let again = Example::with(&[("LISTEN_ADDR", addr)]).await;
    let is_live = "return document.querySelector('#connection').textContent === 'live'";
    browser.comes_to(is_live).await;
    again
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_reports_an_absent_service_and_reconnects() {
    let example = Example::start().await;
    let url = example.service.url.clone();
    example.acquire("sku-1", "worker-a", 600_000).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#live-events", "sku-1").await;
        drop(example);
        browser.shows("#connection", "connection lost").await;
        browser.shows("#leases-error", "does not respond").await;
        // The last known leases are still shown.
        assert!(browser.text("#leases-rows").await.contains("sku-1"));

        let again = restarted(browser, &url).await;
        let restart = "are from another process, or from this one after a restart";
        browser.shows("#live-events", restart).await;
        let id = again.service.id().to_string();
        browser.shows("#process", &id).await;
        browser.shows("#leases-summary", "No lease is held").await;
        assert_eq!(browser.text("#leases-error").await, "");
        again.acquire("sku-2", "worker-b", 600_000).await;
        browser.shows("#live-events", "sku-2").await;
        let refused = ["ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET"];
        let cut = ["ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_EMPTY_RESPONSE"];
        browser.is_clean(&url, &[refused, cut].concat()).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_page_reports_a_restart_of_the_service() {
    let example = Example::start().await;
    let url = example.service.url.clone();
    example.acquire("sku-1", "worker-a", 600_000).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#live-events", "sku-1").await;
        browser.click("#live-pause").await;
        drop(example);
        browser.shows("#connection", "connection lost").await;
        let again = restarted(browser, &url).await;
        again.acquire("sku-2", "worker-b", 600_000).await;
        browser.click("#live-pause").await;
        browser.shows("#live-events", "sku-2").await;
        let text = browser.text("#live-events").await;
        assert_contains!(text, "are from another process");
    })
    .await;
}

/// A script that makes the process refuse the next stream, as if the user was no longer signed in.
const REFUSE: &str = "
    const ask = window.fetch;
    window.fetch = async (to, init) =>
        String(to).includes('api/events') ? new Response(null, { status: 401 }) : ask(to, init);
    window.EventSource = class extends EventSource {
        constructor() { super('api/none'); }
    };
    return null";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_shows_why_the_event_stream_is_refused() {
    let example = Example::start().await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#connection", "live").await;
        browser.run(REFUSE).await;
        // The current stream ends after 10 seconds.
        let refused = "You are no longer signed in";
        browser.shows("#connection", refused).await;
        let expected = ["api/none", "404"];
        browser.is_clean(&example.service.url, &expected).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hidden_or_left_page_resumes_when_visible() {
    let example = Example::start().await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#connection", "live").await;
        browser.goto(&example.service.url("/")).await;
        browser.shows("#verdict-text", "Play the story").await;
        example.acquire("sku-1", "worker-a", 600_000).await;
        browser.back().await;
        browser.shows("#live-events", "sku-1").await;
        browser.shows("#connection", "live").await;

        // Opens eight pages in one browser, which opens at most six connections to a host.
        let states = "const at = document.querySelector('#connection'); window.states = []; \
             new MutationObserver(() => states.push(at.dataset.state)).observe(at, { attributes: true })";
        browser.run(states).await;
        let first = browser.get("window").await;
        for _ in 0..7 {
            let other = browser.post("window/new", json!({ "type": "tab" })).await;
            browser.post("window", json!({ "handle": other["handle"] })).await;
            browser.goto(&example.console()).await;
            browser.shows("#live-events", "sku-1").await;
        }
        example.acquire("sku-2", "worker-b", 600_000).await;
        browser.shows("#leases-rows", "sku-2").await;
        browser.post("window", json!({ "handle": first })).await;
        browser.shows("#live-events", "sku-2").await;
        // The hidden page has paused the feed, and has missed no event.
        let states = browser.run("return [...new Set(states)]").await;
        assert_eq!(states, json!(["paused", "live"]));
        assert_eq!(browser.run("return document.querySelectorAll('.event.note').length").await, 0);
        let is_clean = browser.is_clean(&example.service.url, &[]);
        tokio::time::timeout(Duration::from_secs(20), is_clean).await.unwrap();
    })
    .await;
}
