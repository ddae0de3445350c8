//! The download of weights as a picture or as data.

use super::AppState;
use super::answer::{ApiError, ApiResult, download};
use super::api::{compute, find_run, range};
use super::runs::Run;
use crate::draw::{Fonts, Palette, Picture, Scale, Theme};
use crate::words::{Matrix, MatrixOptions};
use axum::extract::{Path, Query};
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct ExportQuery {
    format: String,
    layer: usize,
    /// One head; without it, the mean of all.
    head: Option<usize>,
    rows: Option<String>,
    cols: Option<String>,
    #[serde(default)]
    words: u8,
    /// Whether special tokens are included.
    #[serde(default = "one")]
    special: u8,
    scale: Option<String>,
    palette: Option<String>,
    theme: Option<String>,
}

/// Looks up a value by name; without a name, the first.
fn named<T: Copy>(all: &[(&str, T)], name: Option<&str>) -> ApiResult<T> {
    let found = name.map_or(all.first(), |name| all.iter().find(|(known, _)| *known == name));
    let names = || all.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    found
        .map(|(_, value)| *value)
        .ok_or_else(|| ApiError::bad_request(format!("`{}` is none of {}", name.unwrap_or(""), names())))
}

fn one() -> u8 {
    1
}

/// Maximum weights in a file.
const MAX_WEIGHTS: usize = 4 << 20;

pub(super) async fn export(
    axum::extract::State(state): axum::extract::State<Arc<AppState>>,
    Path(id): Path<String>,
    Query(query): Query<ExportQuery>,
) -> ApiResult {
    let run = find_run(&state, &id)?;
    compute(&state.light, move || file(&run, &query)).await
}

fn file(run: &Run, query: &ExportQuery) -> ApiResult {
    let missing = || ApiError::not_found(format!("there is no layer {}", query.layer));
    let [n, m] = run.recording.layers.get(query.layer).ok_or_else(missing)?.size();
    let (rows, columns) = (range(query.rows.as_deref(), n)?, range(query.cols.as_deref(), m)?);
    if rows.len().saturating_mul(columns.len()) > MAX_WEIGHTS {
        return Err(ApiError::bad_request("the selection is too large for a file").hint("zoom in"));
    }
    let options = MatrixOptions {
        head: query.head,
        rows: Some(rows),
        columns: Some(columns),
        words: query.words != 0,
        text_only: query.special == 0,
    };
    let name = |end: &str| {
        let head = query.head.map_or("mean".to_owned(), |head| format!("head-{head}"));
        format!("attention-layer-{}-{head}.{end}", query.layer)
    };
    if query.format == "html" {
        return Ok(download(&name("html"), "text/html; charset=utf-8", super::standalone_page(&run.recording)?.into()));
    }
    let (scale, palette) =
        (named(&Scale::ALL, query.scale.as_deref())?, named(&Palette::ALL, query.palette.as_deref())?);
    let theme = named(&[("light", Theme::Light), ("dark", Theme::Dark)], query.theme.as_deref())?;
    let matrix = Matrix::of(&run.recording, query.layer, &options)?;
    let layer = &run.recording.layers[query.layer];
    let title = match query.head {
        Some(head) => format!("{} · head {head}", layer.name),
        None => format!("{} · mean of {} heads", layer.name, layer.heads()),
    };
    let picture = |matrix: Matrix| Picture { matrix, title: Some(title), scale, palette, theme };
    let text = |end: &str, kind, text: String| Ok(download(&name(end), kind, text.into()));
    match query.format.as_str() {
        "svg" => text("svg", "image/svg+xml", picture(matrix).svg()?),
        "png" => Ok(download(&name("png"), "image/png", picture(matrix).png(2.0, &Fonts::of_system())?.bytes)),
        "json" => text("json", "application/json", matrix.json()),
        "csv" => text("csv", "text/csv; charset=utf-8", matrix.csv()),
        "npy" => Ok(download(&name("npy"), "application/octet-stream", matrix.npy()?)),
        "safetensors" => Ok(download(&name("safetensors"), "application/octet-stream", matrix.safetensors()?)),
        "pharaoh" => text("txt", "text/plain; charset=utf-8", matrix.pharaoh() + "\n"),
        other => Err(ApiError::bad_request(format!("`{other}` is not a format that can be exported"))),
    }
}
