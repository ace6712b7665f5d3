//! A real Chromium, controlled through ChromeDriver.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    panic::{AssertUnwindSafe, resume_unwind},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::FutureExt;
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::{eventually, http::Answer};

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
        let port = port.expect("chromium-driver reports no port");
        let url = format!("http://127.0.0.1:{port}");
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
    client: Client,
    /// The URL of the session of WebDriver.
    session: String,
    _driver: Arc<Driver>,
}

/// Sends a command of WebDriver, and returns its result.
async fn result(request: RequestBuilder) -> Value {
    let answer = Answer::to(request).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["value"].take()
}

/// Returns the id of an element in a result.
fn id_of(element: &Value) -> String {
    let id = &element["element-6066-11e4-a52e-4f735466cecf"];
    id.as_str().unwrap().to_owned()
}

/// Runs a test in a browser. Closes the browser even if the test panics.
pub async fn in_browser(test: impl AsyncFnOnce(&Browser)) {
    let _one_of_few = BROWSERS.acquire().await.unwrap();
    let driver = Driver::shared();
    let arguments = "--headless --disable-gpu --disable-dev-shm-usage --window-size=1280,900";
    let mut arguments: Vec<_> = arguments.split(' ').collect();
    // The sandbox of Chromium does not work for root.
    if fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0) {
        arguments.push("--no-sandbox");
    }
    let capabilities = json!({
        "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        "goog:chromeOptions": { "args": arguments },
    });
    let client = Client::new();
    let sessions = format!("{}/session", driver.url);
    let capabilities = json!({ "capabilities": { "alwaysMatch": capabilities } });
    let session = result(client.post(&sessions).json(&capabilities)).await;
    let browser = Browser {
        session: format!("{sessions}/{}", session["sessionId"].as_str().unwrap()),
        client,
        _driver: driver,
    };
    let ended = AssertUnwindSafe(test(&browser)).catch_unwind().await;
    if ended.is_err() {
        let page = async {
            let source = "return document.documentElement.outerHTML";
            eprintln!(
                "the page was:\n{}\nits log: {:?}",
                browser.run(source).await.as_str().unwrap_or_default(),
                browser.log().await
            );
        };
        // A tab that has crashed does not answer.
        let _ = AssertUnwindSafe(page).catch_unwind().await;
    }
    let _ = browser.client.delete(&browser.session).send().await;
    if let Err(panic) = ended {
        resume_unwind(panic);
    }
}

/// Returns the folder for pictures, if the variable `TEST_PICTURES` names one.
pub fn pictures() -> Option<String> {
    std::env::var("TEST_PICTURES").ok()
}

impl Browser {
    /// Sends a command of WebDriver that has no parameters, and returns its result.
    pub async fn get(&self, command: &str) -> Value {
        result(self.client.get(format!("{}/{command}", self.session))).await
    }

    /// Sends a command of WebDriver with these parameters, and returns its result.
    pub async fn post(&self, command: &str, parameters: Value) -> Value {
        let request = self.client.post(format!("{}/{command}", self.session));
        result(request.json(&parameters)).await
    }

    pub async fn goto(&self, url: &str) {
        self.post("url", json!({ "url": url })).await;
    }

    pub async fn back(&self) {
        self.post("back", json!({})).await;
    }

    /// Runs a script, and returns its result.
    pub async fn run(&self, script: &str) -> Value {
        self.run_with(script, json!([])).await
    }

    async fn run_with(&self, script: &str, arguments: Value) -> Value {
        let parameters = json!({ "script": script, "args": arguments });
        self.post("execute/sync", parameters).await
    }

    /// Returns the visible text of an element, or an empty string if there is no such element.
    pub async fn text(&self, css: &str) -> String {
        let script = "return document.querySelector(arguments[0])?.innerText ?? ''";
        let text = self.run_with(script, json!([css])).await;
        text.as_str().unwrap_or_default().to_owned()
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

    /// Waits until a dialog is open.
    pub async fn opens(&self, css: &str) {
        let is_open = format!("return document.querySelector('{css}').open");
        self.comes_to(&is_open).await;
    }

    /// Waits until a dialog is closed.
    pub async fn closes(&self, css: &str) {
        let is_closed = format!("return !document.querySelector('{css}').open");
        self.comes_to(&is_closed).await;
    }

    /// Waits until the table of the leases or the fences has this number of rows.
    pub async fn has_rows(&self, table: &str, count: usize) {
        let rows = format!("document.querySelectorAll('#{table}-rows tr').length");
        self.comes_to(&format!("return {rows} === {count}")).await;
    }

    /// Waits for an element, and returns its id.
    async fn element(&self, css: &str) -> String {
        let exists = "return Boolean(document.querySelector(arguments[0]))";
        eventually!(
            &format!("{css} exists"),
            self.run_with(exists, json!([css])).await == true
        );
        let parameters = json!({ "using": "css selector", "value": css });
        id_of(&self.post("element", parameters).await)
    }

    pub async fn click(&self, css: &str) {
        let id = self.element(css).await;
        self.post(&format!("element/{id}/click"), json!({})).await;
    }

    pub async fn fill(&self, css: &str, text: &str) {
        let id = self.element(css).await;
        self.post(&format!("element/{id}/clear"), json!({})).await;
        self.enter(&id, text).await;
    }

    /// Presses keys in the focused element.
    pub async fn press(&self, keys: &str) {
        let focus = id_of(&self.get("element/active").await);
        self.enter(&focus, keys).await;
    }

    async fn enter(&self, id: &str, text: &str) {
        let parameters = json!({ "text": text });
        self.post(&format!("element/{id}/value"), parameters).await;
    }

    pub async fn devtools(&self, command: &str, parameters: Value) -> Value {
        let parameters = json!({ "cmd": command, "params": parameters });
        self.post("goog/cdp/execute", parameters).await
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
        let log = self.post("se/log", json!({ "type": "browser" })).await;
        let lines = log.as_array().unwrap().iter();
        lines.map(Value::to_string).collect()
    }

    /// Checks that the browser has logged no errors except the expected ones, and that the page has
    /// sent requests only to its own host. Chromium logs each response with a status of 400 or
    /// above.
    pub async fn is_clean(&self, url: &str, expected: &[&str]) {
        let log = self.log().await;
        let is_expected = |line: &String| expected.iter().any(|text| line.contains(text));
        let wrong: Vec<_> = log.iter().filter(|line| !is_expected(line)).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        let requests = self.post("se/log", json!({ "type": "performance" })).await;
        let mut asked = 0;
        for entry in requests.as_array().unwrap() {
            let message: Value = serde_json::from_str(entry["message"].as_str().unwrap()).unwrap();
            let message = &message["message"];
            if message["method"] != "Network.requestWillBeSent" {
                continue;
            }
            let to = message["params"]["request"]["url"].as_str().unwrap();
            let is_own = to.starts_with(url) || to.starts_with("data:");
            assert!(is_own, "the page sent a request to {to}");
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
        self.post("execute/async", json!({ "script": drawn, "args": [] }))
            .await;
        let parameters = json!({ "format": "png" });
        let picture = self.devtools("Page.captureScreenshot", parameters).await;
        let picture = BASE64_STANDARD.decode(picture["data"].as_str().unwrap());
        fs::write(Path::new(&folder).join(name), picture.unwrap()).unwrap();
        self.devtools("Emulation.clearDeviceMetricsOverride", json!({}))
            .await;
    }
}
