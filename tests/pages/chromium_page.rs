//! The console in a browser, on both databases: leases, fences and live events.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    browser::{Browser, in_browser, pictures},
    service::Example,
};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    eventually,
    http::Answer,
};

async fn first_row_shows(browser: &Browser, text: &str) {
    browser.shows("#leases-rows tr:first-child", text).await;
}

/// Opens the dialog of a resource.
async fn look_up(browser: &Browser, name: &str) {
    browser.fill("#fences-text", name).await;
    browser.click("#fences-search [value='look-up']").await;
}

on_both_databases!(listed_lease_shows_waiters_and_breaks_after_confirmation);

async fn listed_lease_shows_waiters_and_breaks_after_confirmation<DB: TestDatabase>() {
    let example = Example::over::<DB>().await;
    let lease = example.acquire("sku-1", "worker-a", 600_000).await;
    example.acquire("sku-2", "worker-b", 600_000).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#connection", "live").await;
        first_row_shows(browser, "worker-a").await;
        let wait = json!({ "owner": "worker-c", "wait_ms": 60_000 });
        let waiting = tokio::spawn(Answer::to(example.ask("sku-1", wait)));
        let row = browser.text("#leases-rows tr:first-child").await;
        assert!(row.contains("sku-1") && row.contains("1000000001"), "{row}");
        browser
            .shows("#leases-rows tr:first-child td[data-label='Waiters']", "1")
            .await;
        // The bar shrinks.
        let width = "return parseFloat(document.querySelector('#leases-rows .fill').style.width)";
        let before = browser.run(width).await.as_f64().unwrap();
        eventually!(
            "the bar is shorter",
            browser.run(width).await.as_f64().unwrap() < before
        );

        browser.click("#leases-rows tr:first-child .danger").await;
        let question = browser.text("#break").await;
        assert_contains!(question, "worker-a holds sku-1");
        // Without confirmation, the lease is not broken.
        browser.click("#break-no").await;
        browser.closes("#break").await;
        assert!(browser.text("#leases-rows").await.contains("worker-a"));
        browser.click("#leases-rows tr:first-child .danger").await;
        let second_click = "const yes = document.querySelector('#break-yes');
            yes.dispatchEvent(new MouseEvent('click', { detail: 2 }));
            return yes.ariaDisabled";
        // No request is sent.
        assert_eq!(browser.run(second_click).await, "false");
        browser.click("#break-yes").await;
        first_row_shows(browser, "worker-c").await;
        browser.shows("#live-events", "broken by an operator").await;
        browser.shows("#live-events", "granted to worker-c").await;
        browser.is_clean(&example.service.url, &[]).await;
        assert_eq!(waiting.await.unwrap().status, 201);
    })
    .await;
    example.refuses(&lease, 1, 412, "stale-token").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_of_a_later_holder_is_not_broken() {
    let example = Example::start().await;
    let lease = example.acquire("sku-1", "worker-a", 600_000).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.click("#leases-rows tr:first-child .danger").await;
        browser.run(FAIL).await;
        browser.click("#break-yes").await;
        let unknown = "It may still execute the request";
        browser.shows("#break-error", unknown).await;
        browser.run(ANSWER_AGAIN).await;
        example.release(&lease).await;
        example.acquire("sku-1", "worker-b", 600_000).await;
        // The refusal arrives after the user has closed the dialog.
        browser.run(&hold_back("api/break")).await;
        browser.click("#break-yes").await;
        browser.comes_to("return Boolean(window.answer)").await;
        browser.click("#break-no").await;
        browser.run("window.answer(); return null").await;
        browser.opens("#break").await;
        let not_held = "This lease on sku-1 is not held";
        browser.shows("#break-error", not_held).await;
        browser.click("#break-no").await;
        first_row_shows(browser, "worker-b").await;
        let expected = ["api/break", "409"];
        browser.is_clean(&example.service.url, &expected).await;
    })
    .await;
}

/// Creates events for a picture of the last minutes.
async fn busy_for_a_minute(example: &Example) {
    for beat in 0..120 {
        for number in 0..=(beat * 7 % 5) {
            let order = format!("order-{number}");
            let lease = example.acquire(&order, "worker-1", 5_000).await;
            assert_eq!(example.write(&lease, 7).await.status, 200);
            if beat * 3 % 11 == 0 {
                example.refuses(&lease, 7, 412, "stale-token").await;
            }
            example.release(&lease).await;
        }
        tokio::time::sleep(Duration::from_millis(450)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_shown_live_and_refusals_are_explained() {
    let pictured = pictures().is_some();
    let example = Example::start().await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#connection", "live").await;
        let process = browser.text("#process").await;
        assert_contains!(process, &example.service.id().to_string());
        assert!(browser.text("#live-empty").await.contains("No events yet"));
        if pictured {
            busy_for_a_minute(&example).await;
        }

        for number in 1..=9 {
            let (order, owner) = (
                format!("order-{number}"),
                format!("worker-{}", number % 3 + 1),
            );
            let lease = example.acquire(&order, &owner, 60_000 * number).await;
            assert_eq!(example.write(&lease, 7).await.status, 200);
        }
        let (first, second) = example.late_holder("sku-1").await;
        let wait = json!({ "owner": "worker-c", "wait_ms": 60_000 });
        let waiting = tokio::spawn(Answer::to(example.ask("sku-1", wait)));
        let waits = "worker-c waits in the queue";
        browser.shows("#live-events", waits).await;
        example.refuses(&first, 9, 412, "stale-token").await;
        let refusal = "#live-events [data-kind='stale']";
        browser.shows(refusal, "worker-b holds it now").await;
        let text = browser.text(refusal).await;
        let (presented, highest_stale) = (&first["token"], second["token"].as_i64().unwrap() - 1);
        let numbers = format!("presented {presented}, highest stale token {highest_stale}");
        assert_contains!(text, &numbers);
        assert_contains!(text, "It was granted to worker-a at");
        assert_contains!(text, ": worker-b holds it now");
        assert_contains!(text, &format!("with token {}, since", second["token"]));
        browser.shows("#live-announce", "sku-1, stale").await;
        if pictured {
            browser.picture("console.png", 1200, 860).await;
        } else {
            browser.shows("#counts li:nth-child(1) .count", "9").await;
            assert_eq!(browser.text("#counts li:nth-child(2) .count").await, "1");
        }

        // Repeated equal events are shown as one event with a count.
        for _ in 0..40 {
            example.refuses(&first, 9, 412, "stale-token").await;
        }
        let times = format!("{refusal} .times");
        browser.shows(&times, "\u{d7}41").await;
        for status in [200, 412] {
            assert_eq!(example.write(&second, 9).await.status, status);
        }
        let used = format!("sku-1 refused: {} was used already", second["token"]);
        browser.shows("#live-events", &used).await;
        browser.click("#live-pause").await;
        let lease = example.acquire("sku-3", "worker-a", 600_000).await;
        browser.shows("#leases-rows", "sku-3").await;
        assert!(!browser.text("#live-events").await.contains("sku-3"));
        browser.click("#live-pause").await;
        browser.shows("#live-events", "sku-3").await;
        browser.click("#live-show [value='refusals']").await;
        assert!(!browser.text("#live-events").await.contains("sku-3"));
        // The browser does not restore the filter, which the list would not follow.
        browser.goto(&example.service.url("/")).await;
        browser.back().await;
        browser.shows("#live-events", "sku-3").await;
        let filter = "return document.querySelector('#live-show').value";
        assert_eq!(browser.run(filter).await, "all");
        example.release(&lease).await;
        example.release(&second).await;
        assert_eq!(waiting.await.unwrap().status, 201);
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

/// The page lists fewer events than there are writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writes_displace_no_event_of_a_lease() {
    let example = Example::start().await;
    example.acquire("sku-1", "worker-a", 600_000).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#connection", "live").await;
        for number in 1..=250 {
            let name = format!("many-{number}");
            assert_eq!(example.write_with(&name, "7", 1).await.status, 200);
            // A message contains at most 128 writes.
            if number % 50 == 0 {
                browser.shows("#live-events", &name).await;
            }
        }
        let listed =
            "return document.querySelectorAll(\"#live-events [data-kind='admitted']\").length";
        assert_eq!(browser.run(listed).await, 200);
        let text = browser.text("#live-events").await;
        assert_contains!(text, "granted to worker-a");
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fence_is_reset_after_its_condition_is_confirmed() {
    let example = Example::start().await;
    let lease = example.acquire("sku-1", "worker-a", 600_000).await;
    let forged = "900000000000000;resource=\"sku-1\"";
    assert_eq!(example.write_with("sku-1", forged, 1).await.status, 200);
    example.release(&lease).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#fences-rows", "900000000000000").await;
        look_up(browser, "sku-1").await;
        browser.shows("#look-up-facts", "900000000000000").await;
        let facts = browser.text("#look-up-facts").await;
        assert!(
            facts.contains("Not held") && facts.contains("1000000001"),
            "{facts}"
        );
        browser.click("#look-up-reset").await;
        browser.opens("#reset").await;
        let text = browser.text("#reset").await;
        let condition = "From now on, no client uses an existing token above this one";
        assert_contains!(text, condition);
        // Unless the condition is checked, no request is sent.
        browser.click("#reset-yes").await;
        browser.opens("#reset").await;
        browser.click("#reset-condition").await;
        let is_valid = "return document.querySelector('#reset-token').validity.valid";
        browser.fill("#reset-token", "0").await;
        assert_eq!(browser.run(is_valid).await, false);
        browser.fill("#reset-token", "7").await;
        assert_eq!(browser.run(is_valid).await, true);
        browser.click("#reset-yes").await;
        let above = "reset to 1000000001 or above";
        browser.shows("#reset-error", above).await;
        browser.fill("#reset-token", "1000000001").await;
        browser.click("#reset-yes").await;
        browser.closes("#reset").await;
        browser.shows("#look-up-facts", "1000000001").await;
        browser.click("#look-up-close").await;
        let rows = async || browser.text("#fences-rows").await;
        eventually!("the row changes", !rows().await.contains("900000000000000"));
        browser.is_clean(&example.service.url, &["api/reset"]).await;
    })
    .await;
    let lease = example.acquire("sku-1", "worker-a", 600_000).await;
    assert_eq!(example.write(&lease, 3).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_dialog_shows_a_lease_granted_since_the_look_up() {
    let example = Example::start().await;
    let lease = example.acquire("sku-1", "worker-a", 600_000).await;
    example.release(&lease).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        look_up(browser, "sku-1").await;
        browser.shows("#look-up-facts", "Not held").await;
        example.acquire("sku-1", "worker-b", 600_000).await;
        browser.click("#look-up-reset").await;
        let holds = "worker-b holds the lease";
        browser.shows("#reset-text", holds).await;
        browser.click("#reset-no").await;
        let focus = "return document.activeElement.id";
        assert_eq!(browser.run(focus).await, "look-up-close");
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

/// Returns a script that holds back requests until `answer` is called. Their URLs contain `part`.
fn hold_back(part: &str) -> String {
    format!(
        "const ask = window.fetch;
        window.fetch = async (to, init) => {{
            if (!String(to).includes('{part}')) return ask(to, init);
            await new Promise((done) => {{ window.answer = done; }});
            const answer = await ask(to, init);
            setTimeout(() => {{ window.answered = true; }}, 300);
            return answer;
        }};
        return null"
    )
}

/// During an upgrade, the lookup may be answered by a process whose version names the lease
/// differently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn look_up_by_another_version_is_not_shown_as_free() {
    let example = Example::start().await;
    example.acquire("sku-1", "worker-a", 600_000).await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.run(RENAMES_THE_LEASE).await;
        look_up(browser, "sku-1").await;
        let versions = "different versions. Reload the page.";
        browser.shows("#look-up-error", versions).await;
        assert_eq!(browser.text("#look-up-facts").await, "");
    })
    .await;
}

/// A script that renames the lease in the response to a lookup.
const RENAMES_THE_LEASE: &str = "
    const ask = window.fetch;
    window.fetch = async (to, init) => {
        const answer = await ask(to, init);
        if (!String(to).includes('api/fence?')) return answer;
        const { held_lease, ...found } = await answer.json();
        return Response.json({ ...found, lease: { held: true, ...held_lease } });
    };
    return null";

/// Looks up one resource, and then another one whose response arrives first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_changes_nothing_about_another_resource() {
    let example = Example::start().await;
    for name in ["sku-1", "sku-2"] {
        let token = format!("900000000000000;resource=\"{name}\"");
        assert_eq!(example.write_with(name, &token, 1).await.status, 200);
    }
    let max_token = async |name: &str| {
        let url = format!("/console/api/fence?resource={name}");
        let fence = example.client.get(example.service.url(&url));
        Answer::to(fence).await.json()["max_token"].clone()
    };
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#fences-rows", "sku-2").await;
        browser.run(&hold_back("resource=sku-1")).await;
        look_up(browser, "sku-1").await;
        browser.comes_to("return Boolean(window.answer)").await;
        browser.click("#look-up-close").await;
        look_up(browser, "sku-2").await;
        browser.shows("#look-up-facts", "900000000000000").await;
        browser.click("#look-up-reset").await;
        browser.run("window.answer(); return null").await;
        browser.comes_to("return window.answered === true").await;
        browser.click("#reset-condition").await;
        browser.fill("#reset-token", "1000000001").await;
        browser.click("#reset-yes").await;
        browser.closes("#reset").await;
        browser.shows("#look-up-title", "sku-2").await;
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
    assert_eq!(max_token("sku-1").await, 900_000_000_000_000_i64);
    assert_eq!(max_token("sku-2").await, 1_000_000_001);
}

/// Confirms that a lease is broken, and asks to break another one before the response arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_leaves_another_confirmation_open() {
    let example = Example::start().await;
    in_browser(async |browser| {
        for is_lost in [false, true] {
            let lease = example.acquire("sku-1", "worker-a", 600_000).await;
            let other = example.acquire("sku-2", "worker-b", 600_000).await;
            browser.goto(&example.console()).await;
            browser.shows("#leases-rows", "sku-2").await;
            browser.run(&hold_back("api/break")).await;
            browser.click("#leases-rows tr:first-child .danger").await;
            browser.click("#break-yes").await;
            browser.comes_to("return Boolean(window.answer)").await;
            browser.click("#break-no").await;
            let break_other = "[aria-label='Break the lease on sku-2']";
            browser.click(break_other).await;
            if is_lost {
                example.release(&lease).await;
            }
            browser.run("window.answer(); return null").await;
            browser.comes_to("return window.answered === true").await;
            browser.shows("#break", "worker-b holds sku-2").await;
            assert_eq!(browser.text("#break-error").await, "");
            let is_ready = "return document.querySelector('#break').open && document.querySelector('#break-yes').ariaDisabled === 'false'";
            assert_eq!(browser.run(is_ready).await, true);
            browser.click("#break-no").await;
            browser.has_rows("leases", 1).await;
            example.release(&other).await;
        }
        let expected = ["api/break", "409"];
        browser.is_clean(&example.service.url, &expected).await;
    })
    .await;
}

/// A script that delays each list of leases by a second.
const SLOW_LISTS: &str = "
    const ask = window.fetch;
    window.fetch = async (to, init) => {
        if (String(to).includes('api/leases')) await new Promise((done) => setTimeout(done, 1_000));
        return ask(to, init);
    };
    return null";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_list_is_drawn_during_steady_lease_events() {
    let example = Example::start().await;
    let steady_events = async {
        for _ in 0_u64.. {
            let lease = example.acquire("busy", "worker-b", 600_000).await;
            example.release(&lease).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.shows("#connection", "live").await;
        browser.run(SLOW_LISTS).await;
        example.acquire("sku-1", "worker-a", 600_000).await;
        tokio::select! {
            () = browser.shows("#leases-rows", "sku-1") => {}
            () = steady_events => {}
        }
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

/// A script that ends the effect of [`FAIL`] or [`EMPTY_PAGES`].
const ANSWER_AGAIN: &str = "window.fetch = window.ask; return null";

/// A script that makes each request fail, until [`ANSWER_AGAIN`].
const FAIL: &str = "
    window.ask = window.fetch;
    window.fetch = async () => { throw new TypeError(); };
    return null";

/// A script that makes each page of a list empty, although a page follows, until `fetch` is set to
/// `ask`.
const EMPTY_PAGES: &str = "
    window.ask = window.fetch;
    window.fetch = async (to, init) => {
        if (!/api\\/(leases|fences)/.test(to)) return ask(to, init);
        const page = { leases: [], fences: [], cursor: 'next', after: 'next', examined: 0 };
        return new Response(JSON.stringify(page));
    };
    return null";

/// A script that records in `announced` the summaries of lists that screen readers announce.
const RECORD_ANNOUNCED: &str = "
    window.announced = [];
    for (const summary of document.querySelectorAll('#leases-summary, #fences-summary')) {
        const note = () => { if (summary.ariaLive !== 'off') announced.push(summary.textContent); };
        new MutationObserver(note).observe(summary, { childList: true });
    }
    return null";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_page_is_not_shown_as_an_empty_list() {
    let example = Example::start().await;
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        let shows_empty_lists = async || {
            browser.shows("#leases-summary", "No lease is held.").await;
            browser.shows("#fences-summary", "No fences.").await;
        };
        shows_empty_lists().await;
        browser.run(RECORD_ANNOUNCED).await;
        browser.run(EMPTY_PAGES).await;
        for table in ["leases", "fences"] {
            let summary = format!("#{table}-summary");
            browser.shows(&summary, "None on this page.").await;
        }
        browser.run(ANSWER_AGAIN).await;
        shows_empty_lists().await;
        // The user has not requested these changes.
        assert_eq!(browser.run("return announced").await, json!([]));
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_leases_and_fences_are_paged_and_searchable() {
    let example = Example::start().await;
    for number in 100..230 {
        let (name, owner) = (format!("many-{number}"), format!("owner-{number}"));
        example.acquire(&name, &owner, 600_000).await;
    }
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.run(RECORD_ANNOUNCED).await;
        for table in ["leases", "fences"] {
            browser.has_rows(table, 50).await;
            let first_row = async || browser.text(&format!("#{table}-rows tr th")).await;
            let is_disabled = async |button: &str| {
                let script = format!("return document.querySelector('#{table}-{button}').disabled");
                browser.run(&script).await
            };
            let shows_page = async |first: &str| {
                eventually!("the page is shown", first_row().await == first);
            };
            // Both clicks precede the response.
            let double_click = async |button: &str| {
                let script = format!(
                    "const at = document.querySelector('#{table}-{button}'); at.click(); at.click()"
                );
                browser.run(&script).await;
            };
            let mut pages = vec![first_row().await];
            for left in [50, 30] {
                browser.click(&format!("#{table}-next")).await;
                let last = &pages[pages.len() - 1];
                eventually!("the next page is shown", first_row().await != *last);
                browser.has_rows(table, left).await;
                pages.push(first_row().await);
            }
            assert_eq!(is_disabled("next").await, true);
            // A disabled button loses the focus.
            let focus = browser.run("return document.activeElement.id").await;
            assert_eq!(focus, format!("{table}-title"));
            let announced = browser.run("return announced.splice(0)").await;
            let announced = announced.as_array().unwrap();
            let is_page = |said: &Value, page| said.as_str().unwrap().starts_with(page);
            assert_eq!(announced.len(), 2, "{announced:?}");
            assert!(is_page(&announced[0], "Page 2: "), "{announced:?}");
            assert!(is_page(&announced[1], "Page 3: "), "{announced:?}");
            double_click("back").await;
            shows_page(&pages[1]).await;
            double_click("next").await;
            shows_page(&pages[2]).await;
            browser.click(&format!("#{table}-back")).await;
            shows_page(&pages[1]).await;

            // A failed request leaves the page as it is.
            browser.run(FAIL).await;
            let error = format!("#{table}-error");
            browser.shows(&error, "does not respond").await;
            browser.run(ANSWER_AGAIN).await;
            eventually!("it is cleared", browser.text(&error).await.is_empty());
            assert_eq!(first_row().await, pages[1]);

            browser.click(&format!("#{table}-back")).await;
            shows_page(&pages[0]).await;
            assert_eq!(is_disabled("back").await, true);
            browser.run("announced.splice(0)").await;
        }
        // A failed search does not leave the rows of another list.
        browser.run(FAIL).await;
        browser.fill("#leases-text", "OWNER-217").await;
        browser.click("#leases-search button").await;
        browser.shows("#leases-error", "does not respond").await;
        browser.has_rows("leases", 0).await;
        assert_eq!(browser.text("#leases-summary").await, "");
        browser.run(ANSWER_AGAIN).await;
        browser.click("#leases-search button").await;
        let found = "1 found in 130 leases";
        browser.shows("#leases-summary", found).await;
        assert!(browser.text("#leases-rows").await.contains("many-217"));
        browser.fill("#fences-text", "many-21").await;
        browser.click("#fences-search [value='begins']").await;
        let found = "10 on this page that start with “many-21”";
        browser.shows("#fences-summary", found).await;
        browser.is_clean(&example.service.url, &[]).await;
    })
    .await;
}
