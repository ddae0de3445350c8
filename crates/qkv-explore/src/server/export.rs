//! What is shown, as a file to keep.

use super::State;
use super::answer::{Answer, Refusal, download};
use super::api::{beside, find, range};
use super::runs::Run;
use crate::draw::{Fonts, Palette, Picture, Scale, Theme};
use crate::words::{Cut, Matrix};
use axum::extract::{Path, Query};
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct Asked {
    format: String,
    layer: usize,
    /// One head; the mean of all without it.
    head: Option<usize>,
    rows: Option<String>,
    cols: Option<String>,
    #[serde(default)]
    words: u8,
    /// Whether what stands for no text is in it.
    #[serde(default = "one")]
    special: u8,
    scale: Option<String>,
    palette: Option<String>,
    theme: Option<String>,
}

/// One of some names; the first without any.
fn named<T: Copy>(all: &[(&str, T)], name: Option<&str>) -> Answer<T> {
    let found = name.map_or(all.first(), |name| all.iter().find(|(known, _)| *known == name));
    let names = || all.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    found
        .map(|(_, value)| *value)
        .ok_or_else(|| Refusal::bad(format!("`{}` is none of {}", name.unwrap_or(""), names())))
}

fn one() -> u8 {
    1
}

/// Weights of a file, at most.
const MOST: usize = 4 << 20;

pub(super) async fn export(
    axum::extract::State(state): axum::extract::State<Arc<State>>,
    Path(id): Path<String>,
    Query(asked): Query<Asked>,
) -> Answer {
    let run = find(&state, &id)?;
    beside(&state.light, move || written(&run, &asked)).await
}

fn written(run: &Run, asked: &Asked) -> Answer {
    let missing = || Refusal::missing(format!("there is no layer {}", asked.layer));
    let [n, m] = run.recording.layers.get(asked.layer).ok_or_else(missing)?.size();
    let (rows, columns) = (range(asked.rows.as_deref(), n)?, range(asked.cols.as_deref(), m)?);
    if rows.len().saturating_mul(columns.len()) > MOST {
        return Err(Refusal::bad("that is too large for a file").hint("zoom in, or ask for fewer rows"));
    }
    let cut = Cut {
        head: asked.head,
        rows: Some(rows),
        columns: Some(columns),
        words: asked.words != 0,
        text_only: asked.special == 0,
    };
    let name = |end: &str| {
        let head = asked.head.map_or("mean".to_owned(), |head| format!("head-{head}"));
        format!("attention-layer-{}-{head}.{end}", asked.layer)
    };
    if asked.format == "html" {
        return Ok(download(&name("html"), "text/html; charset=utf-8", super::stand_alone(&run.recording)?.into()));
    }
    let (scale, palette) =
        (named(&Scale::ALL, asked.scale.as_deref())?, named(&Palette::ALL, asked.palette.as_deref())?);
    let theme = named(&[("light", Theme::Light), ("dark", Theme::Dark)], asked.theme.as_deref())?;
    let matrix = Matrix::of(&run.recording, asked.layer, &cut)?;
    let layer = &run.recording.layers[asked.layer];
    let title = match asked.head {
        Some(head) => format!("{} · head {head}", layer.name),
        None => format!("{} · mean of {} heads", layer.name, layer.heads()),
    };
    let picture = |matrix: Matrix| Picture { matrix, title: Some(title), scale, palette, theme };
    let text = |end: &str, kind, text: String| Ok(download(&name(end), kind, text.into()));
    match asked.format.as_str() {
        "svg" => text("svg", "image/svg+xml", picture(matrix).svg()?),
        "png" => Ok(download(&name("png"), "image/png", picture(matrix).png(2.0, &Fonts::of_system())?.bytes)),
        "json" => text("json", "application/json", matrix.json()),
        "csv" => text("csv", "text/csv; charset=utf-8", matrix.csv()),
        "npy" => Ok(download(&name("npy"), "application/octet-stream", matrix.npy()?)),
        "safetensors" => Ok(download(&name("safetensors"), "application/octet-stream", matrix.safetensors()?)),
        "pharaoh" => text("txt", "text/plain; charset=utf-8", matrix.pharaoh() + "\n"),
        other => Err(Refusal::bad(format!("`{other}` is no kind of file that can be written"))),
    }
}
