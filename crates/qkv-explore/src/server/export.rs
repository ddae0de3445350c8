//! What is shown, as a file to keep.

use super::State;
use super::answer::{Answer, Refusal, download};
use super::api::{find, range};
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
    let matrix = Matrix::of(&run.recording, asked.layer, &cut)?;
    match asked.format.as_str() {
        "json" => {
            let json = serde_json::to_vec(&matrix).expect("plain values");
            Ok(download(&name("json"), "application/json", json))
        }
        "pharaoh" => Ok(download(&name("txt"), "text/plain; charset=utf-8", (matrix.pharaoh() + "\n").into())),
        other => Err(Refusal::bad(format!("`{other}` is no kind of file that can be written"))),
    }
}
