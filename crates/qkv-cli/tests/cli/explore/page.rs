//! The page over a translation by the embedded model.

use crate::explore::browser::Browser;
use crate::explore::program::{self, Serving};
use serde_json::Value;

#[test]
fn a_sentence_that_is_typed_is_translated_and_shown() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    assert_eq!(browser.text("#output"), "Long time, no see.");
    browser.press("/");
    browser.until("document.activeElement.id === 'text'");
    browser.write("她说她明天不来。");
    browser.press("Enter");
    browser.until("document.querySelector('#output').textContent !== 'Long time, no see.'");
    let output = browser.text("#output");
    assert!(output.contains("tomorrow"), "{output}");
    // The output can be stepped through, token by token.
    browser.eval("document.activeElement.blur()");
    browser.press("]");
    browser.until("document.querySelector('.chip.now') && document.querySelector('.candidate')");
    assert!(browser.text(".candidates").contains('%'));
    // The URL holds the whole state, and opening it restores that state.
    let address = browser.eval("location.href").as_str().unwrap().to_owned();
    assert!(address.contains("text=") && address.contains("step=0"), "{address}");
    browser.go(&address);
    browser.until("document.querySelector('.chip.now')");
    assert_eq!(browser.text("#output"), output);
    browser.is_content();
}

#[test]
fn a_text_that_is_refused_is_said_so_and_the_picture_stays() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    browser.click("#text");
    browser.eval("document.querySelector('#text').select()");
    browser.write(&"好".repeat(3000));
    browser.press("Enter");
    browser.until("document.querySelector('#prompt .refusal')");
    assert!(browser.text("#prompt .refusal").contains("3000"), "{}", browser.text("#prompt .refusal"));
    assert_eq!(browser.text("#output"), "Long time, no see.");
    assert_eq!(browser.eval("document.querySelectorAll('.view canvas').length > 0"), true);
}

#[test]
fn layer_and_head_follow_the_arrow_keys_and_the_address() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    browser.go(&format!("{}#layer=0&head=0", serving.url));
    let place = browser.text("#where");
    assert!(place.contains("layer 0") && place.contains("head 0"), "{place}");
    browser.press("ArrowRight");
    browser.until("document.querySelector('#where').textContent.includes('head 1')");
    browser.press("ArrowDown");
    browser.until("document.querySelector('#where').textContent.includes('layer 1')");
    let address = browser.eval("location.hash").as_str().unwrap().to_owned();
    assert!(address.contains("layer=1") && address.contains("head=1"), "{address}");
    // Exactly one thumbnail is marked, and the head is announced.
    assert_eq!(browser.eval("document.querySelectorAll('.thumb[aria-current]').length"), 1);
    browser.until("document.querySelector('#say').textContent.includes('layer 1, head 1')");
    // At the ends, the keys do nothing.
    for _ in 0..9 {
        browser.press("ArrowLeft");
    }
    browser.until("document.querySelector('#where').textContent.includes('head 0')");
    // In the picture, arrows move between cells; with Shift they change layer and head everywhere.
    browser.eval("document.querySelector('.over').focus()");
    browser.press_shift("ArrowRight");
    browser.until("document.querySelector('#where').textContent.includes('head 1')");
    browser.is_content();
}

#[test]
fn every_number_in_the_heatmap_is_the_servers() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    let run: Value = browser.eval("JSON.parse(document.querySelector('#qkv-first').textContent).run");
    let id = run["id"].as_u64().unwrap();
    let cross = &run["groups"].as_array().unwrap().iter().find(|group| group["name"] == "cross").unwrap()["layers"];
    let layer = cross[1].as_u64().unwrap() as usize;
    let [n, m] = ["n", "m"].map(|side| run["layers"][layer][side].as_u64().unwrap() as usize);
    browser.go(&format!("{}#layer={layer}&head=2", serving.url));
    let weights = browser.numbers(&format!("/api/runs/{id}/weights?layer={layer}&head=2"));
    assert_eq!(weights.len(), n * m);
    browser.eval("document.querySelector('.over').focus()");
    browser.press("ArrowRight"); // the cursor appears at the first cell
    for row in 0..n {
        for step in 0..m {
            // Rows alternate in direction (boustrophedon).
            let column = if row % 2 == 0 { step } else { m - 1 - step };
            browser.until("!document.querySelector('.tip').hidden");
            let expected = program::shown(weights[row * m + column]);
            assert_eq!(browser.text(".tip-weight"), expected, "row {row}, column {column}");
            if step + 1 < m {
                browser.press(if row % 2 == 0 { "ArrowRight" } else { "ArrowLeft" });
            }
        }
        assert!(browser.text(".tip").contains("row sums to 1.0000"));
        browser.press("ArrowDown");
    }
    browser.is_content();
}

#[test]
fn a_weight_tells_how_it_came_about() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    browser.go(&format!("{}#layer=0&head=1", serving.url));
    let weights = browser.numbers("/api/runs/0/weights?layer=0&head=1");
    browser.eval("document.querySelector('.over').focus()");
    browser.press("ArrowRight");
    browser.press("Enter");
    browser.until("!document.querySelector('#pair').hidden && document.querySelector('#pair .ledger .end b')");
    assert_eq!(browser.text("#pair .ledger .end b"), program::shown(weights[0]));
    assert_eq!(browser.text("#pair .result"), program::shown(weights[0]));
    assert_eq!(browser.eval("document.querySelectorAll('#pair .strip').length"), 3);
    // Escape closes it, and the focus is where it was.
    browser.press("Escape");
    browser.until("document.querySelector('#pair').hidden");
    assert_eq!(browser.eval("document.activeElement.className"), "over");
    browser.is_content();
}

#[test]
fn every_view_shows_itself_and_nothing_is_fetched_from_elsewhere() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    for (key, sign) in [
        ("2", ".lines .tokens button"),
        ("3", ".all .thumb"),
        ("4", ".view[data-view=rollout] canvas"),
        ("5", ".measures tbody tr"),
        ("1", ".chart .cells"),
    ] {
        browser.press(key);
        browser.until(&format!("document.querySelector('{sign}')"));
        browser.until("!document.querySelector('.pane.busy')");
        assert_eq!(browser.eval("document.querySelector('.pane .refusal:not([hidden])')?.textContent ?? ''"), "");
    }
    // The table sorts, and its rows open heads.
    browser.press("5");
    browser.until("document.querySelector('[data-sort=entropy]')");
    browser.click("[data-sort=entropy]");
    browser.until("document.querySelector('th[aria-sort=descending]')");
    let column = "[...document.querySelectorAll('.measures tbody tr')].map(r => parseFloat(r.cells[1].textContent))";
    assert_eq!(browser.eval(&format!("(c => c.every((x, i) => !i || c[i - 1] >= x))({column})")), true);
    browser.click(".measures tbody tr");
    browser.until("document.querySelector('.chart .cells')");
    let elsewhere = "performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)).length";
    assert_eq!(browser.eval(elsewhere), 0);
    browser.is_content();
}

#[test]
fn two_sentences_stand_side_by_side() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    browser.press("c");
    browser.until("document.querySelectorAll('.pane .chart .cells').length === 2");
    assert_ne!(browser.eval("document.querySelectorAll('.answer')[1].textContent"), "Long time, no see.");
    browser.press("c");
    browser.until("document.querySelectorAll('.pane').length === 1");
    browser.is_content();
}

#[test]
fn a_small_window_needs_no_scrolling_sideways() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    browser.resize(360, 740);
    for key in ["1", "2", "3", "4", "5"] {
        browser.press(key);
        browser.until("!document.querySelector('.pane.busy')");
        browser.until("document.documentElement.scrollWidth <= 360");
    }
    browser.is_content();
}

#[test]
fn joined_hidden_and_dropped_tokens_leave_the_sums_that_are_promised() {
    let serving = Serving::start(&[]);
    let mut browser = Browser::open(&serving.url);
    // Three rows over four keys; the keys 1 and 2 are one word, so are the queries 1 and 2. Key 0 is special, and the
    // sink.
    let made = |display: &str| {
        format!(
            "(async () => {{ const {{ matrix }} = await import('qkv/matrix');
              const token = (text, word, special = false) => ({{ text, word, special }});
              const keys = [token('<s>', null, true), token('▁to', 0), token('day', 0), token('.', 1)];
              const queries = [token('a', 0), token('b', 1), token('c', 1)];
              const weights = Float32Array.of(0.5, 0.25, 0.125, 0.125, 0, 0.5, 0.25, 0.25, 1, 0, 0, 0);
              const plain = {{ words: false, special: true, sink: true, renormalize: false, mass: 1 }};
              const made = matrix(weights, [3, 4], [queries, keys], {{ ...plain, ...{display} }});
              return {{ rows: made.rows.map(r => r.label), cols: made.cols.map(c => c.label), values: [...made.values],
                        sums: [...made.sums], kept: made.kept && [...made.kept] }}; }})()"
        )
    };
    let words = browser.eval(&made("{ words: true }"));
    assert_eq!(words["cols"], serde_json::json!(["<s>", "today", "."]));
    assert_eq!(words["rows"], serde_json::json!(["a", "bc"]));
    assert_eq!(words["values"], serde_json::json!([0.5, 0.375, 0.125, 0.5, 0.375, 0.125]));
    assert_eq!(words["sums"], serde_json::json!([1, 1]));
    // Hidden tokens take their weight with them, unless rows are renormalized; the sum of the full row is kept.
    let hidden = browser.eval(&made("{ special: false }"));
    assert_eq!(hidden["values"], serde_json::json!([0.25, 0.125, 0.125, 0.5, 0.25, 0.25, 0, 0, 0]));
    assert_eq!(hidden["sums"], serde_json::json!([1, 1, 1]));
    let again = browser.eval(&made("{ sink: false, renormalize: true }"));
    assert_eq!(again["values"], serde_json::json!([0.5, 0.25, 0.25, 0.5, 0.25, 0.25, 0, 0, 0]));
    // The fewest weights that reach the fraction: ½ + ¼ in the first row, ½ + ¼ in the second, the 1 in the third.
    let kept = browser.eval(&made("{ mass: 0.75 }"));
    assert_eq!(kept["kept"], serde_json::json!([1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0]));
    browser.is_content();
}
