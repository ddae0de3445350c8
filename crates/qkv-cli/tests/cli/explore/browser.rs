//! A headless browser, driven over its DevTools protocol: a websocket, JSON in and out. Only as much as the tests need.

use serde_json::{Value, json};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tungstenite::{Message, WebSocket};

/// How long anything on the page may take. Test machines are busy.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// A browser with one page. It ends with the test, however the test ends.
pub struct Browser {
    child: Child,
    folder: tempfile::TempDir,
    socket: WebSocket<TcpStream>,
    session: Value,
    asked: u64,
    /// The page's errors: uncaught exceptions, and whatever its security policy blocked.
    faults: Vec<String>,
}

/// The path of a browser.
fn program() -> PathBuf {
    if let Some(given) = std::env::var_os("QKV_BROWSER") {
        return given.into();
    }
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    let found = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    found.into_iter().find(|path| path.is_file()).unwrap_or_else(|| {
        panic!("no browser: none of {names:?} is installed; hint: `cargo xtask test` installs one, or set QKV_BROWSER")
    })
}

/// Polls until there is an answer.
fn patiently<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        sleep(PAUSE);
    }
}

impl Browser {
    /// Starts a browser and opens a page.
    pub fn open(url: &str) -> Browser {
        let folder = tempfile::tempdir().unwrap();
        let profile = folder.path().join("profile");
        let mut command = Command::new(program());
        command.args(["--headless=new", "--no-sandbox", "--remote-debugging-port=0", "--window-size=1280,800"]);
        command.args(["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]);
        // It talks only to the page under test.
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        command.arg("--disable-quic");
        command.arg(format!("--user-data-dir={}", profile.display())).arg("about:blank");
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // The browser writes the port and path it listens on.
        let port = profile.join("DevToolsActivePort");
        let place = patiently("the browser to start", || {
            assert!(child.try_wait().unwrap().is_none(), "the browser ended at once");
            let text = std::fs::read_to_string(&port).ok()?;
            let (port, path) = text.split_once('\n')?;
            Some((port.parse::<u16>().ok()?, path.trim().to_owned()))
        });
        let stream = TcpStream::connect(("127.0.0.1", place.0)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (socket, _) = tungstenite::client(format!("ws://127.0.0.1:{}{}", place.0, place.1), stream).unwrap();
        let (asked, faults) = (0, Vec::new());
        let mut browser = Browser { child, folder, socket, session: Value::Null, asked, faults };
        std::fs::create_dir(browser.downloads()).unwrap();
        let downloads = browser.downloads();
        browser.ask("Browser.setDownloadBehavior", json!({ "behavior": "allow", "downloadPath": downloads }));
        let target = browser.ask("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.ask("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = attached["sessionId"].clone();
        for domain in ["Page", "Runtime", "Log"] {
            browser.ask(&format!("{domain}.enable"), json!({}));
        }
        browser.go(url);
        browser
    }

    fn downloads(&self) -> PathBuf {
        self.folder.path().join("downloads")
    }

    /// Sends a command to the browser and waits for its answer. Events that arrive meanwhile are checked for faults.
    pub fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.asked += 1;
        let id = self.asked;
        let mut question = json!({ "id": id, "method": method, "params": parameters });
        if !self.session.is_null() {
            question["sessionId"] = self.session.clone();
        }
        self.socket.send(Message::text(question.to_string())).unwrap();
        loop {
            let Message::Text(text) = self.socket.read().unwrap() else { continue };
            let told: Value = serde_json::from_str(text.as_str()).unwrap();
            if told["id"] == json!(id) {
                assert!(told["error"].is_null(), "{method}: {}", told["error"]);
                return told["result"].clone();
            }
            let fault = match told["method"].as_str() {
                Some("Runtime.exceptionThrown") => Some(&told["params"]["exceptionDetails"]),
                Some("Log.entryAdded") => Some(&told["params"]["entry"]).filter(|entry| entry["level"] == "error"),
                _ => None,
            };
            self.faults.extend(fault.map(Value::to_string));
        }
    }

    /// Opens an address and waits until the page is drawn.
    pub fn go(&mut self, url: &str) {
        // By way of a blank page, so that an address that differs only after `#` is loaded anew.
        self.ask("Page.navigate", json!({ "url": "about:blank" }));
        self.ask("Page.navigate", json!({ "url": url }));
        self.until("document.querySelector('#where') && document.querySelector('.view canvas, .view .sentence')");
    }

    /// Evaluates an expression on the page, awaiting promises.
    pub fn eval(&mut self, expression: &str) -> Value {
        let asked = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.ask("Runtime.evaluate", asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Waits until an expression holds.
    pub fn until(&mut self, expression: &str) {
        patiently(&format!("`{expression}`"), || (self.eval(&format!("Boolean({expression})")) == true).then_some(()));
    }

    /// The text of an element.
    pub fn text(&mut self, selector: &str) -> String {
        let found = self.eval(&format!("document.querySelector({})?.textContent ?? null", json!(selector)));
        found.as_str().unwrap_or_else(|| panic!("no `{selector}` on the page")).to_owned()
    }

    /// The numbers that the server returns for a path.
    pub fn numbers(&mut self, path: &str) -> Vec<f32> {
        let bytes = "r => r.ok ? r.arrayBuffer() : Promise.reject(r.status)";
        let read = "b => Array.from(new Float32Array(b))";
        let found = self.eval(&format!("fetch({}).then({bytes}).then({read})", json!(path)));
        found.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
    }

    /// Presses a key by its name: `ArrowUp`, `Enter`, `?`.
    pub fn press(&mut self, key: &str) {
        self.press_with(key, 0);
    }

    /// The same with Shift held.
    pub fn press_shift(&mut self, key: &str) {
        self.press_with(key, 8);
    }

    fn press_with(&mut self, key: &str, modifiers: u8) {
        let (code, text) = match key {
            "ArrowLeft" => (37, None),
            "ArrowUp" => (38, None),
            "ArrowRight" => (39, None),
            "ArrowDown" => (40, None),
            "Escape" => (27, None),
            "Tab" => (9, None),
            "Enter" => (13, Some("\r")),
            one => (0, Some(one)),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers });
            if let (Some(text), "keyDown") = (text, kind) {
                event["text"] = json!(text);
            }
            self.ask("Input.dispatchKeyEvent", event);
        }
    }

    /// Types into the focused element.
    pub fn write(&mut self, text: &str) {
        self.ask("Input.insertText", json!({ "text": text }));
    }

    /// Where the middle of an element is.
    pub fn middle(&mut self, selector: &str) -> [f64; 2] {
        let found = self.eval(&format!(
            "(() => {{ const e = document.querySelector({}); e.scrollIntoView({{ block: 'center' }});
             const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; }})()",
            json!(selector)
        ));
        [found[0].as_f64().unwrap(), found[1].as_f64().unwrap()]
    }

    fn mouse(&mut self, kind: &str, [x, y]: [f64; 2], more: Value) {
        let mut event = json!({ "type": kind, "x": x, "y": y });
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.ask("Input.dispatchMouseEvent", event);
    }

    /// Moves the pointer.
    pub fn point(&mut self, at: [f64; 2]) {
        self.mouse("mouseMoved", at, json!({}));
    }

    /// Clicks an element.
    pub fn click(&mut self, selector: &str) {
        let at = self.middle(selector);
        self.drag(at, at);
    }

    /// Drags from one place to another.
    pub fn drag(&mut self, from: [f64; 2], to: [f64; 2]) {
        self.point(from);
        self.mouse("mousePressed", from, json!({ "button": "left", "buttons": 1, "clickCount": 1 }));
        if from != to {
            self.mouse("mouseMoved", to, json!({ "button": "left", "buttons": 1 }));
        }
        self.mouse("mouseReleased", to, json!({ "button": "left", "clickCount": 1 }));
    }

    /// Turns the wheel; up is negative.
    pub fn wheel(&mut self, at: [f64; 2], turns: f64) {
        self.mouse("mouseWheel", at, json!({ "deltaX": 0, "deltaY": turns }));
    }

    /// Makes the window this large.
    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask("Emulation.setDeviceMetricsOverride", size);
    }

    /// The file that a click downloads.
    pub fn download(&mut self, selector: &str) -> (String, Vec<u8>) {
        let downloads = self.downloads();
        let whole = |folder: &Path| {
            let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            files.find(|path| path.extension().is_none_or(|end| end != "crdownload"))
        };
        assert_eq!(whole(&downloads), None, "nothing was brought before");
        self.click(selector);
        let path = patiently("a file", || {
            let path = whole(&downloads)?;
            // The browser renames a file once it is complete.
            (std::fs::metadata(&path).ok()?.len() > 0).then_some(path)
        });
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        (path.file_name().unwrap().to_string_lossy().into_owned(), bytes)
    }

    /// Asserts that the page had no errors.
    pub fn is_content(&mut self) {
        self.eval("1");
        assert!(self.faults.is_empty(), "{:#?}", self.faults);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
