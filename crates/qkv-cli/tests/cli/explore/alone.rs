//! Exports: files, and the standalone page.

use crate::explore::browser::Browser;
use crate::explore::program::{self, Serving};
use serde_json::Value;

/// All weights of the first head of the first layer, from the server; the matrix is square.
fn first_weights(browser: &mut Browser) -> Vec<Vec<f32>> {
    let flat = browser.numbers("/api/runs/0/weights?layer=0&head=0");
    flat.chunks(flat.len().isqrt()).map(<[f32]>::to_vec).collect()
}

#[test]
fn what_is_shown_can_be_kept_as_files() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    browser.go(&format!("{}#layer=0&head=0", serving.url));
    let weights = first_weights(&mut browser);

    browser.press("e");
    browser.until("document.querySelector('[data-format=json]')");
    let (name, bytes) = browser.download("[data-format=json]");
    assert!(name.ends_with(".json"), "{name}");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let kept: Vec<Vec<f32>> = serde_json::from_value(file["weights"].clone()).unwrap();
    assert_eq!(kept, weights);

    // Files written by the page itself: numbers with their tokens, and the picture.
    browser.click("#export summary");
    browser.until("document.querySelector('#export .menu button')");
    let (name, bytes) = browser.download("#export .menu button:nth-of-type(2)");
    assert!(name.ends_with(".csv"), "{name}");
    let text = String::from_utf8(bytes).unwrap();
    // A line starts with its token, in quotes.
    let numbers = |line: &str| line.rsplit_once("\",").unwrap().1.split(',').map(|x| x.parse().unwrap()).collect();
    let kept: Vec<Vec<f32>> = text.lines().skip(1).map(numbers).collect();
    assert_eq!(kept, weights);
    browser.click("#export summary");
    browser.until("document.querySelector('#export .menu button')");
    let (name, bytes) = browser.download("#export .menu button:nth-of-type(1)");
    assert!(name.ends_with(".png") && bytes.starts_with(b"\x89PNG"), "{name}");
    browser.is_content();
}

#[test]
fn a_page_that_stands_alone_opens_from_disk_with_the_same_numbers() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    browser.go(&format!("{}#layer=0&head=0", serving.url));
    let weights = first_weights(&mut browser);
    browser.press("e");
    browser.until("document.querySelector('[data-format=html]')");
    let (name, bytes) = browser.download("[data-format=html]");
    assert!(name.ends_with(".html"), "{name}");
    drop(serving);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    browser.go(&format!("file://{}#layer=0&head=0", path.display()));
    assert_eq!(browser.text("#output"), "Long time, no see.");
    browser.eval("document.querySelector('.over').focus()");
    browser.press("ArrowRight");
    browser.until("!document.querySelector('.tip').hidden");
    assert_eq!(browser.text(".tip-weight"), program::shown(weights[0][0]));
    browser.press_shift("ArrowDown");
    browser.until("document.querySelector('#where').textContent.includes('layer 1')");
    // What needs the program is not offered.
    assert_eq!(browser.eval("document.querySelector('#tab-rollout').hidden"), true);
    assert_eq!(browser.eval("document.querySelector('#text') === null"), true);
    browser.is_content();
}
