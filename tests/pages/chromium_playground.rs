//! The playground of the example in a browser: the story with the fence, and without it.

use serde_json::{Value, json};

use super::{
    browser::{Browser, in_browser},
    service::Example,
};
use crate::support::eventually;

async fn verdict(browser: &Browser) -> [String; 3] {
    let mut figures = vec![];
    for id in ["stock", "sold", "expected"] {
        figures.push(browser.text(&format!("#{id}")).await);
    }
    figures.try_into().unwrap()
}

/// Returns the number of these elements in the timeline.
async fn count(browser: &Browser, css: &str) -> u64 {
    let script = format!("return document.querySelectorAll('#timeline {css}').length");
    browser.run(&script).await.as_u64().unwrap()
}

/// The buttons of a worker, by their position.
const ACQUIRE: u32 = 1;
const PAUSE: u32 = 2;
const WRITE: u32 = 3;

/// Presses a button of a worker as soon as the button is enabled.
async fn press(browser: &Browser, worker: u32, button: u32) {
    let css = format!("#workers fieldset:nth-child({worker}) button:nth-child({button})");
    let can = format!("return document.querySelector('{css}').ariaDisabled === 'false'");
    browser.comes_to(&can).await;
    browser.click(&css).await;
}

async fn leases(example: &Example) -> Value {
    let answer = reqwest::get(example.service.url("/console/api/leases")).await;
    let page: Value = answer.unwrap().json().await.unwrap();
    page["leases"].clone()
}

const RIGHT: &str = "Right: the fence refused the late write";

async fn open(browser: &Browser, example: &Example) {
    browser.goto(&example.service.url("/")).await;
    browser.shows("#verdict-text", "Play the story").await;
}

async fn is_enabled(browser: &Browser, button: &str) {
    let script = format!("return !document.querySelector('{button}').disabled");
    browser.comes_to(&script).await;
}

/// Waits until a worker has read this stock.
async fn has_read(browser: &Browser, worker: u32, stock: u32) {
    let css = format!("#workers fieldset:nth-child({worker}) p");
    browser.shows(&css, &format!("It has read {stock}")).await;
}

const RED: &str = "rgb(184, 39, 44)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_the_fence_the_late_write_is_refused() {
    let secret = "k1:".to_owned() + &"0123456789abcdef".repeat(4);
    let example = Example::with(&[("TOKEN_KEY", &secret)]).await;
    in_browser(async |browser| {
        open(browser, &example).await;
        browser.click("#play").await;
        browser.shows("#verdict-text", RIGHT).await;
        assert_eq!(verdict(browser).await, ["9", "1", "9"]);
        assert_eq!(count(browser, ".write.bounced").await, 1);
        assert_eq!(count(browser, ".write.written").await, 1);
        assert_eq!(count(browser, ".lease.believed").await, 1);
        let color = "return getComputedStyle(document.querySelector('#timeline .bounced')).stroke";
        assert_eq!(browser.run(color).await, RED);
        // The bars show their tokens, and the later token is higher.
        let tokens = browser.run("return [...document.querySelectorAll('#timeline .token')].map((one) => one.textContent)").await;
        assert_eq!(tokens, json!(["#2", "#3"]));
        let log = browser.text("#log").await;
        assert_contains!(log, "412 stale-token, presented #2, highest stale token #3");
        is_enabled(browser, "#play").await;
        browser.picture("playground.png", 1180, 930).await;
        // The timeline stops by itself, together with the bar of the pause.
        let width = "return document.querySelector('#timeline .now').getAttribute('x1')";
        eventually("the time is frozen", async || {
            let before = browser.run(width).await;
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            browser.run(width).await == before
        })
        .await;
        browser.is_clean(&example.service.url, &["412"]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stock_is_wrong_only_without_the_fence() {
    let example = Example::start().await;
    in_browser(async |browser| {
        open(browser, &example).await;
        browser.click("#fence").await;
        let is_checked = "return document.querySelector('#fence').ariaChecked";
        assert_eq!(browser.run(is_checked).await, "false");
        browser.click("#play").await;
        let wrong = "Wrong: one sale was overwritten";
        browser.shows("#verdict-text", wrong).await;
        assert_eq!(verdict(browser).await, ["9", "2", "8"]);
        assert_eq!(count(browser, ".write.unfenced").await, 2);
        assert_eq!(count(browser, ".stock.wrong").await, 1);
        let color = "return getComputedStyle(document.querySelector('#stock')).color";
        assert_eq!(browser.run(color).await, RED);
        browser.is_clean(&example.service.url, &[]).await;

        browser.click("#fence").await;
        is_enabled(browser, "#play").await;
        browser.click("#play").await;
        browser.shows("#verdict-text", RIGHT).await;
        assert_eq!(verdict(browser).await, ["9", "1", "9"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_and_workers_can_be_run_one_by_one() {
    let example = Example::start().await;
    in_browser(async |browser| {
        open(browser, &example).await;
        for step in 1..=5 {
            is_enabled(browser, "#step").await;
            browser.click("#step").await;
            let is_next =
                format!("return document.querySelectorAll('#story .done').length === {step}");
            browser.comes_to(&is_next).await;
        }
        browser.shows("#verdict-text", RIGHT).await;

        browser.click("#again").await;
        browser.shows("#stock", "10").await;
        let press = async |worker, button| press(browser, worker, button).await;
        press(1, ACQUIRE).await;
        has_read(browser, 1, 10).await;
        press(1, PAUSE).await;
        press(2, ACQUIRE).await;
        has_read(browser, 2, 10).await;
        press(2, WRITE).await;
        browser.shows("#stock", "9").await;
        press(1, PAUSE).await;
        press(1, WRITE).await;
        browser.shows("#verdict-text", RIGHT).await;
        // The next worker reads the current stock.
        press(1, ACQUIRE).await;
        has_read(browser, 1, 9).await;
        press(1, WRITE).await;
        browser.shows("#stock", "8").await;
        assert_eq!(verdict(browser).await, ["8", "2", "8"]);
        // All leases were released.
        assert_eq!(leases(&example).await, json!([]));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starting_over_keeps_no_lease_of_a_waiting_worker() {
    let example = Example::start().await;
    in_browser(async |browser| {
        open(browser, &example).await;
        press(browser, 1, ACQUIRE).await;
        has_read(browser, 1, 10).await;
        press(browser, 2, ACQUIRE).await;
        let waiters = async || leases(&example).await[0]["waiters"].clone();
        eventually!("worker B waits in the queue", waiters().await == 1);
        browser.click("#again").await;
        eventually!("no lease is held", leases(&example).await == json!([]));
        // If worker B kept a lease that was granted after the reset, worker A would wait for it.
        press(browser, 1, ACQUIRE).await;
        has_read(browser, 1, 10).await;
        // A renewal may overtake the release.
        browser.is_clean(&example.service.url, &["409"]).await;
    })
    .await;
}
