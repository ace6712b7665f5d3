//! A real Chromium, controlled through ChromeDriver.

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

/// The driver that concurrent tests share. The last test stops it.
static DRIVER: Mutex<Weak<Driver>> = Mutex::new(Weak::new());
/// A semaphore that limits the number of concurrent browsers, because each has several processes.
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
        // The driver and its browsers get a process group of their own.
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
        let url = format!(
            "http://127.0.0.1:{}",
            port.expect("chromium-driver reports no port")
        );
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

/// A browser with one window. It runs until the end of the test.
pub struct Browser {
    pub client: Client,
    _driver: Arc<Driver>,
}

/// Runs a test in a browser. Closes the browser even if the test panics.
pub async fn in_browser(test: impl AsyncFnOnce(&Browser)) {
    let _one_of_few = BROWSERS.acquire().await.unwrap();
    let driver = Driver::shared();
    let mut arguments = vec![
        "--headless",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ];
    // The sandbox of Chromium does not work for root.
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

/// Returns the folder for pictures, if the variable `TEST_PICTURES` names one.
pub fn pictures() -> Option<String> {
    std::env::var("TEST_PICTURES").ok()
}

/// A command that only ChromeDriver has.
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

    /// Runs a script, and returns its result.
    pub async fn run(&self, script: &str) -> Value {
        self.client.execute(script, vec![]).await.unwrap()
    }

    /// Returns the visible text of an element, or an empty string if there is no such element.
    pub async fn text(&self, css: &str) -> String {
        let script = "return document.querySelector(arguments[0])?.innerText ?? ''";
        let text = self.client.execute(script, vec![css.into()]).await;
        text.unwrap().as_str().unwrap_or_default().to_owned()
    }

    /// Waits until an element contains this text.
    pub async fn shows(&self, css: &str, text: &str) {
        eventually!(
            &format!("{css} shows {text:?}"),
            self.text(css).await.contains(text)
        );
    }

    /// Waits until a script returns true.
    pub async fn comes_to(&self, script: &str) {
        eventually!(script, self.run(script).await == json!(true));
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

    /// Presses keys in the focused element.
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

    /// Sets the size of the window, in CSS pixels.
    pub async fn resize(&self, width: u32, height: u32) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", size)
            .await;
    }

    /// Sets a preference of the user, such as `prefers-color-scheme`.
    pub async fn prefer(&self, feature: &str, value: &str) {
        let features = json!({ "features": [{ "name": feature, "value": value }] });
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    /// Returns the log of the browser since the previous call.
    pub async fn log(&self) -> Vec<String> {
        let log = self
            .client
            .issue_cmd(Own("se/log", json!({ "type": "browser" })));
        let log = log.await.unwrap_or_default();
        let entries = log.as_array().cloned().unwrap_or_default();
        entries.iter().map(Value::to_string).collect()
    }

    /// Checks that the browser has logged no errors except the expected ones, and that the page has
    /// sent requests only to its own host. Chromium logs each response with a status of 400 or
    /// above.
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
            assert!(
                to.starts_with(url) || to.starts_with("data:"),
                "the page sent a request to {to}"
            );
            asked += 1;
        }
        assert!(asked > 3, "only {asked} requests were recorded");
    }

    /// Takes a picture of a window of this size, if there is a folder for pictures.
    pub async fn picture(&self, name: &str, width: u32, height: u32) {
        let Some(folder) = pictures() else {
            return;
        };
        self.devtools("Emulation.setScrollbarsHidden", json!({ "hidden": true }))
            .await;
        self.resize(width, height).await;
        self.run("scrollTo(0, 0); document.activeElement.blur()")
            .await;
        // The layout is complete after two frames.
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
