//! A real Chromium, by ChromeDriver.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    str::FromStr,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use fantoccini::{Client, ClientBuilder, Locator, wd::WebDriverCompatibleCommand};
use hyper_util::client::legacy::connect::HttpConnector;
use reqwest::Url;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::eventually;

/// The driver that tests at the same time share. The last one of them stops it.
static DRIVER: Mutex<Weak<Driver>> = Mutex::new(Weak::new());
/// Browsers at a time: each is several processes.
static BROWSERS: Semaphore = Semaphore::const_new(2);

struct Driver {
    process: Child,
    url: String,
}

impl Driver {
    fn shared() -> Arc<Self> {
        let mut shared = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = shared.upgrade() {
            return driver;
        }
        // In a group of its own, with its browsers.
        let mut process = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("chromium-driver is not installed: use tests/run");
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let mut lines = stdout.lines().map_while(Result::ok);
        let port = lines.find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            Some(port.trim_end_matches('.').to_owned())
        });
        let url = format!("http://127.0.0.1:{}", port.expect("it has started"));
        let driver = Arc::new(Self { process, url });
        *shared = Arc::downgrade(&driver);
        driver
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let group = format!("-{}", self.process.id());
        let _ = Command::new("kill").args(["-TERM", "--", &group]).status();
        let _ = self.process.wait();
    }
}

/// A browser with one window, until the end of the test.
pub struct Browser {
    pub client: Client,
    _driver: Arc<Driver>,
}

/// Runs a test in a browser, and closes that, whatever becomes of the test.
pub async fn in_browser(test: impl AsyncFnOnce(&Browser)) {
    let _one_of_few = BROWSERS.acquire().await.unwrap();
    let driver = Driver::shared();
    let mut arguments = vec![
        "--headless",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ];
    // A sandbox of Chromium's is not for root.
    if fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0) {
        arguments.push("--no-sandbox");
    }
    let capabilities = json!({
        "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        "goog:chromeOptions": { "args": arguments },
    });
    let client = ClientBuilder::new(HttpConnector::new())
        .capabilities(capabilities.as_object().unwrap().clone())
        .connect(&driver.url)
        .await
        .unwrap();
    let browser = Browser {
        client: client.clone(),
        _driver: driver,
    };
    let ended = {
        let test = std::panic::AssertUnwindSafe(test(&browser));
        futures_util::FutureExt::catch_unwind(test).await
    };
    if ended.is_err() {
        let source = client.source().await.unwrap_or_default();
        eprintln!(
            "the page was:\n{source}\nits log: {:?}",
            browser.log().await
        );
    }
    let _ = client.close().await;
    if let Err(panic) = ended {
        std::panic::resume_unwind(panic);
    }
}

/// The folder for pictures, where somebody wants some.
pub fn pictures() -> Option<String> {
    std::env::var("TEST_PICTURES").ok()
}

/// A command of ChromeDriver's own.
#[derive(Debug)]
struct Own(&'static str, Value);

impl WebDriverCompatibleCommand for Own {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, <Url as FromStr>::Err> {
        base.join(&format!(
            "session/{}/{}",
            session.unwrap_or_default(),
            self.0
        ))
    }

    fn method_and_body(&self, _: &Url) -> (http::Method, Option<String>) {
        (http::Method::POST, Some(self.1.to_string()))
    }
}

impl Browser {
    pub async fn goto(&self, url: &str) {
        self.client.goto(url).await.unwrap();
    }

    /// What a script returns.
    pub async fn run(&self, script: &str) -> Value {
        self.client.execute(script, vec![]).await.unwrap()
    }

    /// The text of an element as it is shown; nothing where there is no such element.
    pub async fn text(&self, css: &str) -> String {
        let script = "return document.querySelector(arguments[0])?.innerText ?? ''";
        let text = self.client.execute(script, vec![css.into()]).await;
        text.unwrap().as_str().unwrap_or_default().to_owned()
    }

    /// Waits until an element has this text in it.
    pub async fn shows(&self, css: &str, text: &str) {
        eventually(&format!("{css} shows {text:?}"), async || {
            self.text(css).await.contains(text)
        })
        .await;
    }

    /// Waits until a script returns true.
    pub async fn comes_to(&self, script: &str) {
        eventually(script, async || self.run(script).await == json!(true)).await;
    }

    pub async fn click(&self, css: &str) {
        let element = self.client.wait().for_element(Locator::Css(css)).await;
        element.unwrap().click().await.unwrap();
    }

    pub async fn fill(&self, css: &str, text: &str) {
        let element = self
            .client
            .wait()
            .for_element(Locator::Css(css))
            .await
            .unwrap();
        element.clear().await.unwrap();
        element.send_keys(text).await.unwrap();
    }

    /// Presses keys, wherever the focus is.
    pub async fn press(&self, keys: &str) {
        let focus = self.client.active_element().await.unwrap();
        focus.send_keys(keys).await.unwrap();
    }

    pub async fn devtools(&self, command: &str, parameters: Value) -> Value {
        let body = json!({ "cmd": command, "params": parameters });
        self.client
            .issue_cmd(Own("goog/cdp/execute", body))
            .await
            .unwrap()
    }

    /// A window of this size, in pixels of CSS.
    pub async fn resize(&self, width: u32, height: u32) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", size)
            .await;
    }

    /// What the user prefers: `prefers-color-scheme` and others.
    pub async fn prefer(&self, feature: &str, value: &str) {
        let features = json!({ "features": [{ "name": feature, "value": value }] });
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    /// What the browser has logged since it was asked last.
    pub async fn log(&self) -> Vec<String> {
        let log = self
            .client
            .issue_cmd(Own("se/log", json!({ "type": "browser" })));
        let log = log.await.unwrap_or_default();
        let entries = log.as_array().cloned().unwrap_or_default();
        entries.iter().map(Value::to_string).collect()
    }

    /// Checks that nothing went wrong in the page, but for answers that tests ask for, and that it has asked nobody but
    /// its own host. Chromium logs each answer of 400 and above.
    pub async fn is_clean(&self, url: &str, expected: &[&str]) {
        let log = self.log().await;
        let is_expected = |line: &String| expected.iter().any(|text| line.contains(text));
        let wrong: Vec<_> = log.iter().filter(|line| !is_expected(line)).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        let requests = self
            .client
            .issue_cmd(Own("se/log", json!({ "type": "performance" })));
        let requests = requests.await.unwrap();
        let mut asked = 0;
        for entry in requests.as_array().unwrap() {
            let message: Value = serde_json::from_str(entry["message"].as_str().unwrap()).unwrap();
            let message = &message["message"];
            if message["method"] != "Network.requestWillBeSent" {
                continue;
            }
            let to = message["params"]["request"]["url"].as_str().unwrap();
            assert!(to.starts_with(url) || to.starts_with("data:"), "asked {to}");
            asked += 1;
        }
        assert!(asked > 3, "{asked} requests are not all of them");
    }

    /// Where a variable names a folder, takes a picture of a window of this size into it.
    pub async fn picture(&self, name: &str, width: u32, height: u32) {
        let Some(folder) = pictures() else {
            return;
        };
        self.devtools("Emulation.setScrollbarsHidden", json!({ "hidden": true }))
            .await;
        self.resize(width, height).await;
        self.run("scrollTo(0, 0); document.activeElement.blur()")
            .await;
        // The layout is there with the next frame but one.
        let drawn = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(true)))";
        self.client.execute_async(drawn, vec![]).await.unwrap();
        let parameters = json!({ "format": "png" });
        let picture = self.devtools("Page.captureScreenshot", parameters).await;
        let picture = BASE64_STANDARD
            .decode(picture["data"].as_str().unwrap())
            .unwrap();
        fs::write(Path::new(&folder).join(name), picture).unwrap();
        self.devtools("Emulation.clearDeviceMetricsOverride", json!({}))
            .await;
    }
}
