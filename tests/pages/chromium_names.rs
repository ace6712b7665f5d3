//! Malicious names of resources and owners, in a browser.

use serde_json::json;

use super::{browser::in_browser, service::Example};

const HOSTILE: [&str; 6] = [
    "<img src=x onerror=\"document.title='harmed'\">",
    "<script>document.title='harmed'</script>",
    "\"><svg onload=document.title='harmed'>",
    "javascript:document.title='harmed'",
    "${document.title='harmed'}{{constructor.constructor('document.title=1')()}}",
    "sku-1\u{202e}1-uks\u{200b}\u{fe0f}\u{2800} ",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_shown_as_text_everywhere() {
    let example = Example::start().await;
    for name in HOSTILE {
        let lease = example.acquire(name, name, 600_000).await;
        assert_eq!(example.write(&lease, 1).await.status, 200);
        example.refuses(&lease, 2, 412, "stale-token").await;
    }
    in_browser(async |browser| {
        browser.goto(&example.console()).await;
        browser.has_rows("leases", 6).await;
        browser.shows("#live-events", "holds it now").await;
        // Each name is shown unchanged, except that invisible characters are made visible.
        let texts = browser.run("return [...document.querySelectorAll('#leases-rows th .name')].map((one) => one.textContent)").await;
        for name in &HOSTILE[..5] {
            assert!(texts.as_array().unwrap().contains(&json!(name)), "{texts}");
        }
        let odd = "sku-1U+202E1-uksU+200BU+FE0FU+2800U+0020";
        assert!(texts.as_array().unwrap().contains(&json!(odd)), "{texts}");
        // The names are also shown in each dialog.
        for at in 1..=6 {
            browser.click(&format!("#leases-rows tr:nth-child({at}) th button")).await;
            browser.shows("#look-up-facts", "holds it now").await;
            browser.click("#look-up-break").await;
            browser.shows("#break-text", "holds").await;
            browser.click("#break-no").await;
            browser.click("#look-up-close").await;
        }
        let made = "return document.querySelectorAll('main img, main script, #leases-rows svg, #live-events svg, dialog svg').length";
        assert_eq!(browser.run(made).await, 0);
        assert_eq!(browser.get("title").await, "tower-fence console");
        // Even if the page inserted a script, its content security policy would allow only the
        // files of the page to run.
        let inline = "const made = document.createElement('script'); made.textContent = \"document.title = 'harmed'\"; \
             document.body.append(made); return document.title";
        assert_eq!(browser.run(inline).await, "tower-fence console");
        let log = browser.log().await;
        assert!(log.iter().any(|line| line.contains("Content Security Policy")), "{log:?}");

        // Only the chosen lease is broken, although its name looks like another one.
        browser.goto(&example.console()).await;
        browser.click("#leases-rows tr:nth-child(6) .danger").await;
        browser.click("#break-yes").await;
        browser.has_rows("leases", 5).await;
        assert!(!browser.text("#leases-rows").await.contains("U+202E"));
        browser.is_clean(&example.service.url, &["Content Security Policy"]).await;
    })
    .await;
}
