//! The page: its files, embedded in the program, and the standalone page that is one HTML file.

use super::AppState;
use super::answer::{ApiError, ApiResult};
use super::{api, guard, runs};
use crate::measures;
use crate::recording::Recording;
use axum::extract::Path;
use axum::http::header;
use axum::response::IntoResponse;
use qkv_models::{Error, Result};
use serde_json::{Value, json};
use std::sync::Arc;

include!(concat!(env!("OUT_DIR"), "/page.rs"));

/// An embedded file by name: `index.html`, `style.css`, or a module.
fn embedded(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// The JavaScript modules: name without extension, and source.
fn modules() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.iter().filter_map(|(name, text)| Some((name.strip_suffix(".js")?, *text)))
}

/// JSON for a `<script>` element, escaped so that no text in it can end the element.
fn script_json(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

fn data_element(value: &Value) -> String {
    format!("<script type=\"application/json\" id=\"qkv-first\">{}</script>", script_json(value))
}

pub(super) async fn index(axum::extract::State(state): axum::extract::State<Arc<AppState>>) -> ApiResult {
    let nonce = guard::random_token();
    let imports: serde_json::Map<String, Value> =
        modules().map(|(name, _)| (format!("qkv/{name}"), json!(format!("/page/{name}.js")))).collect();
    let map = script_json(&json!({ "imports": imports }));
    let map = format!("<script type=\"importmap\" nonce=\"{nonce}\">{map}</script>");
    let mut first = api::state_json(&state);
    first["run"] = state.runs.get(0).map_or(Value::Null, |run| run.to_json());
    let page = embedded("index.html").expect("the page has a first file");
    let page = page.replacen("<!--qkv:imports-->", &map, 1).replacen("<!--qkv:first-->", &data_element(&first), 1);
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (header::CONTENT_SECURITY_POLICY, guard::page_policy(&nonce)),
    ];
    Ok((headers, page).into_response())
}

pub(super) async fn file(Path(name): Path<String>) -> ApiResult {
    let text = embedded(&name).ok_or_else(|| ApiError::not_found("there is no such page"))?;
    let content_type = match name.rsplit('.').next() {
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "text/html; charset=utf-8",
    };
    Ok(([(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-cache")], text).into_response())
}

/// Maximum number of weights of a standalone page: 16 MiB, a third more as base64.
const MAX_WEIGHTS: usize = 4 << 20;

/// A recording as one HTML file that opens from disk, with no server and no network.
///
/// # Errors
/// If the recording has too many weights for one file.
pub fn standalone_page(recording: &Recording) -> Result<String> {
    let count: usize = recording.layers.iter().map(|layer| layer.heads() * layer.size()[0] * layer.size()[1]).sum();
    if count > MAX_WEIGHTS {
        let what = format!("a standalone page holds at most {MAX_WEIGHTS} weights; this recording has {count}");
        return Err(Error::invalid(what).with_hint("serve it with `qkv explore`, or write a picture"));
    }
    let mut weights = Vec::with_capacity(recording.layers.len());
    for layer in &recording.layers {
        let of_head = |head| {
            let bytes: Vec<u8> = layer.weights(head)?.data().iter().flat_map(|x| x.to_le_bytes()).collect();
            Ok(base64::encode(bytes))
        };
        weights.push((0..layer.heads()).map(of_head).collect::<Result<Vec<String>>>()?);
    }
    let measured = measures::measure(recording, measures::THRESHOLD)?;
    let first = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "standalone": true,
        "models": [],
        "examples": [],
        "run": runs::recording_json(recording, false),
        "weights": weights,
        "heads": api::measures_json(recording, &measured),
    });
    let imports: serde_json::Map<String, Value> = modules()
        .map(|(name, text)| {
            (format!("qkv/{name}"), json!(format!("data:text/javascript;base64,{}", base64::encode(text))))
        })
        .collect();
    let map = format!("<script type=\"importmap\">{}</script>", script_json(&json!({ "imports": imports })));
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
        .replacen("<!--qkv:first-->", &data_element(&first), 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_end_the_script_element_around_it() {
        let hostile = json!({ "text": "</script><script>alert(1)</script>" });
        assert!(!data_element(&hostile)[1..].contains("<script"), "{}", data_element(&hostile));
    }

    #[test]
    fn every_imported_module_exists() {
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
