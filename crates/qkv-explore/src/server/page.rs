//! The page itself: its files, which are part of the program, and the page that stands alone in one file.

use super::State;
use super::answer::{Answer, Refusal};
use super::{api, runs};
use crate::measures;
use crate::recording::Recording;
use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use qkv_models::{Error, Result};
use serde_json::{Value, json};
use std::sync::Arc;

include!(concat!(env!("OUT_DIR"), "/page.rs"));

/// The page's files by their names: `index.html`, `style.css`, and its modules.
fn embedded(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Names of modules, without their ending.
fn modules() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.iter().filter_map(|(name, text)| Some((name.strip_suffix(".js")?, *text)))
}

/// JSON inside a script: nothing in it may look like an end of the script.
fn in_script(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

fn data(value: &Value) -> String {
    format!("<script type=\"application/json\" id=\"qkv-first\">{}</script>", in_script(value))
}

pub(super) async fn index(axum::extract::State(state): axum::extract::State<Arc<State>>) -> Answer {
    let imports: serde_json::Map<String, Value> =
        modules().map(|(name, _)| (format!("qkv/{name}"), json!(format!("/page/{name}.js")))).collect();
    let map = in_script(&json!({ "imports": imports }));
    let map = format!("<script type=\"importmap\" nonce=\"{}\">{map}</script>", state.guard.nonce);
    let mut first = api::everything(&state);
    first["run"] = state.runs.get(0).map_or(Value::Null, |run| run.told());
    let page = embedded("index.html").expect("the page has a first file");
    let page = page.replacen("<!--qkv:imports-->", &map, 1).replacen("<!--qkv:first-->", &data(&first), 1);
    let kind = (header::CONTENT_TYPE, "text/html; charset=utf-8");
    Ok(([kind, (header::CACHE_CONTROL, "no-store")], page).into_response())
}

pub(super) async fn file(Path(name): Path<String>) -> Answer<Response> {
    let text = embedded(&name).ok_or_else(|| Refusal::missing("there is no such page"))?;
    let kind = match name.rsplit('.').next() {
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "text/html; charset=utf-8",
    };
    Ok(([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache")], text).into_response())
}

/// Weights of a page that stands alone, at most: 16 MiB, a third more as text.
const MOST: usize = 4 << 20;

/// One HTML file with everything in it: it opens from disk, with no server and no network.
///
/// # Errors
/// Where there are more weights than a page can carry.
pub fn stand_alone(recording: &Recording) -> Result<String> {
    let count: usize = recording.layers.iter().map(|layer| layer.heads() * layer.size()[0] * layer.size()[1]).sum();
    if count > MOST {
        let what = format!("a page that stands alone holds at most {MOST} weights, here are {count}");
        return Err(Error::invalid(what).with_hint("serve it with `qkv explore`, or write a picture"));
    }
    let mut weights = Vec::with_capacity(recording.layers.len());
    for layer in &recording.layers {
        let of_head = |head| Ok(base64(layer.weights(head)?.data().iter().flat_map(|x| x.to_le_bytes())));
        weights.push((0..layer.heads()).map(of_head).collect::<Result<Vec<String>>>()?);
    }
    let measured = measures::measure(recording, measures::THRESHOLD)?;
    let first = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "standalone": true,
        "models": [],
        "examples": [],
        "run": runs::described(recording, false),
        "weights": weights,
        "heads": api::measured_as_told(recording, &measured),
    });
    let imports: serde_json::Map<String, Value> = modules()
        .map(|(name, text)| {
            (format!("qkv/{name}"), json!(format!("data:text/javascript;base64,{}", base64(text.bytes()))))
        })
        .collect();
    let map = format!("<script type=\"importmap\">{}</script>", in_script(&json!({ "imports": imports })));
    let style = embedded("style.css").expect("the page has a style");
    let page = embedded("index.html").expect("the page has a first file");
    Ok(page
        .replacen("<link rel=\"stylesheet\" href=\"/page/style.css\">", &format!("<style>\n{style}</style>"), 1)
        .replacen(
            "<script type=\"module\" src=\"/page/main.js\"></script>",
            "<script type=\"module\">import \"qkv/main\";</script>",
            1,
        )
        .replacen("<!--qkv:imports-->", &map, 1)
        .replacen("<!--qkv:first-->", &data(&first), 1))
}

/// Bytes as text.
pub(super) fn base64(bytes: impl Iterator<Item = u8>) -> String {
    const SIGNS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut text, mut three) = (String::new(), Vec::with_capacity(3));
    let mut push = |three: &[u8]| {
        let word = three.iter().fold(0u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - three.len()));
        for at in 0..4 {
            let sign = SIGNS[(word >> (18 - 6 * at)) as usize & 63] as char;
            text.push(if at <= three.len() { sign } else { '=' });
        }
    };
    for byte in bytes {
        three.push(byte);
        if three.len() == 3 {
            push(&three);
            three.clear();
        }
    }
    if !three.is_empty() {
        push(&three);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_text_as_the_standard_has_it() {
        let cases =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")];
        for (bytes, text) in cases {
            assert_eq!(base64(bytes.bytes()), text);
        }
    }

    #[test]
    fn text_cannot_end_the_script_that_it_stands_in() {
        let hostile = json!({ "text": "</script><script>alert(1)</script>" });
        assert!(!data(&hostile)[1..].contains("<script"), "{}", data(&hostile));
    }

    #[test]
    fn every_module_that_is_imported_is_there() {
        let mut imports = 0;
        for (name, text) in modules() {
            for rest in text.split("'qkv/").skip(1) {
                let wanted = rest.split('\'').next().expect("a name");
                assert!(embedded(&format!("{wanted}.js")).is_some(), "`{name}` imports `{wanted}`");
                imports += 1;
            }
        }
        assert!(imports > 20, "modules import each other");
    }
}
