//! The map: an input too long to be drawn whole, opened from a file with q and k.

use crate::explore::browser::Browser;
use crate::explore::program::{self, Serving};

const HEADS: usize = 2;
const N: usize = 600;

#[test]
fn a_long_input_is_a_map_whose_numbers_are_those_of_qkv_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("long.safetensors");
    program::queries_and_keys(&file, HEADS, N, 16);
    let weights = program::weights(folder.path(), "long.safetensors", true);
    let serving = Serving::start(&["--recording", file.to_str().unwrap(), "--causal"]);
    let mut browser = Browser::open(&serving.url);
    browser.until("document.querySelector('.world') && !document.querySelector('.pane.busy')");

    // The wheel zooms around the pointer, and the URL keeps the position.
    let middle = browser.middle(".world");
    let corner = [middle[0] - 60.0, middle[1] + 40.0];
    browser.point(corner);
    browser.wheel(corner, -800.0);
    browser.until("location.hash.includes('at=')");
    let place = |browser: &mut Browser| -> Vec<f64> {
        let at = browser.eval("new URLSearchParams(location.hash.slice(1)).get('at')");
        at.as_str().unwrap().split(',').map(|number| number.parse().unwrap()).collect()
    };
    let near = place(&mut browser);
    assert!(near[2] > 2.0, "a weight has {} pixels", near[2]);
    // A drag moves the map, a key zooms further, and another head keeps the position.
    browser.drag(middle, [middle[0] + 50.0, middle[1]]);
    browser.until(&format!("!location.hash.includes('at={},{},')", near[0], near[1]));
    assert!(place(&mut browser)[1] < near[1], "dragged to the right, the map shows what lies left");
    browser.press("+");
    browser.until(&format!("Number(location.hash.split(',').at(-1)) > {}", near[2] * 1.5));
    browser.press("ArrowRight");
    browser.until("document.querySelector('#where').textContent.includes('head 1')");

    // The tooltip shows the weight that `qkv run --weights` writes for that pair.
    for (row, column) in [(431, 287), (599, 0), (300, 300), (20, 500)] {
        browser.go(&format!("{}#head=1&at={row}.5,{column}.5,20", serving.url));
        let middle = browser.eval(
            "(async () => { const { edge } = await import('qkv/camera');
              const r = document.querySelector('.world').getBoundingClientRect();
              return [r.left + (r.width + edge.left) / 2, r.top + (r.height + edge.top) / 2]; })()",
        );
        browser.point([middle[0].as_f64().unwrap(), middle[1].as_f64().unwrap()]);
        let expected = program::shown(weights[(N + row) * N + column]);
        browser.until(&format!("document.querySelector('.map .tip-weight')?.textContent === '{expected}'"));
        let pair = browser.text(".map .tip-pair");
        assert!(pair.contains(&row.to_string()) && pair.contains(&column.to_string()), "{pair}");
    }
    browser.is_content();
}
