//! What the page asks for. Every number is the library's; nothing is computed here.

use super::answer::{Answer, Refusal, numbers};
use super::runs::{self, Run};
use super::tiles::Tile;
use super::{Served, State};
use crate::measures::{self, MEASURES};
use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, Query};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

type All = axum::extract::State<Arc<State>>;

/// Numbers of one answer, at most.
const NUMBERS: usize = 1 << 20;
/// Pixels of a thumbnail, each way, at most; and of all thumbnails.
const THUMBNAIL: usize = 256;
const THUMBNAILS: usize = 16 << 20;
/// Sizes of thumbnails that are kept of a run.
const GRIDS: usize = 6;
/// Weights that a rollout looks at, at most: some seconds.
const ROLLED: usize = 1 << 33;
/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(60);

/// Computes beside everything else, when it is its turn.
pub(super) async fn beside<T: Send + 'static>(
    turn: &Arc<Semaphore>,
    compute: impl FnOnce() -> Answer<T> + Send + 'static,
) -> Answer<T> {
    let busy = |_| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "too much is being computed").hint("try again");
    let turn = tokio::time::timeout(PATIENCE, turn.clone().acquire_owned()).await.map_err(busy)?;
    // The turn ends with the work, not with who asked for it: whoever leaves makes no room for more.
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        compute()
    })
    .await;
    let failed = |_| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the computation broke off");
    done.map_err(failed)?
}

pub(super) fn find(state: &State, id: &str) -> Answer<Arc<Run>> {
    let known = id.parse().ok().and_then(|id| state.runs.get(id));
    known.ok_or_else(|| Refusal::missing(format!("there is no run `{id}`")).hint("run the text again"))
}

fn layer(run: &Run, layer: usize) -> Answer<&crate::Layer> {
    let missing = || Refusal::missing(format!("there is no layer {layer}"));
    run.recording.layers.get(layer).ok_or_else(missing)
}

/// `3..7`.
pub(super) fn range(text: Option<&str>, limit: usize) -> Answer<Range<usize>> {
    let Some(text) = text else { return Ok(0..limit) };
    let parsed = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    match parsed {
        Some(range) if range.start <= range.end && range.end <= limit => Ok(range),
        _ => Err(Refusal::bad(format!("`{text}` is no range within 0..{limit}")).hint("ranges look like `3..7`")),
    }
}

pub(super) fn everything(state: &State) -> Value {
    let models = state
        .models
        .iter()
        .enumerate()
        .map(|(id, Served { name, note, model })| {
            json!({ "id": id, "name": name, "takes_text": true, "images": model.images(), "note": note })
        });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "models": models.collect::<Vec<_>>(),
        "first": 0,
        "examples": state.examples,
    })
}

pub(super) async fn state(axum::extract::State(state): All) -> Json<Value> {
    Json(everything(&state))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    #[serde(default)]
    model: usize,
    text: String,
    #[serde(default)]
    target: Option<String>,
}

pub(super) async fn new_run(
    axum::extract::State(state): All,
    wanted: Result<Json<Wanted>, JsonRejection>,
) -> Answer<Json<Value>> {
    let Json(Wanted { model, text, target }) =
        wanted.map_err(|e| Refusal::new(e.status(), e.body_text()).hint("send {\"text\": \"…\"}"))?;
    if model >= state.models.len() {
        return Err(Refusal::missing(format!("there is no model {model}")));
    }
    for (name, text) in [("text", Some(&text)), ("target", target.as_ref())] {
        let most = state.models[model].model.longest();
        if let Some(text) = text.filter(|text| text.chars().nth(most).is_some()) {
            let length = text.chars().count();
            let what = format!("the {name} has {length} characters, at most {most} are taken");
            return Err(Refusal::bad(what).hint("give a sentence at a time"));
        }
    }
    let one_line = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (text, target) = (one_line(text), target.map(one_line));
    let all = state.clone();
    let recording =
        beside(&state.light, move || Ok(all.models[model].model.record(&text, target.as_deref(), &all.machine)?))
            .await?;
    Ok(Json(state.runs.add(recording, Some(model)).told()))
}

pub(super) async fn run(axum::extract::State(state): All, Path(id): Path<String>) -> Answer<Json<Value>> {
    Ok(Json(find(&state, &id)?.told()))
}

#[derive(Deserialize)]
pub(super) struct Part {
    side: usize,
    from: usize,
    to: usize,
}

pub(super) async fn tokens(
    axum::extract::State(state): All,
    Path(id): Path<String>,
    Query(Part { side, from, to }): Query<Part>,
) -> Answer<Json<Value>> {
    let run = find(&state, &id)?;
    let missing = || Refusal::missing(format!("there is no side {side}"));
    let side = run.recording.sides.get(side).ok_or_else(missing)?;
    if from > to || to > side.len() || to - from > NUMBERS / 64 {
        return Err(Refusal::bad(format!("tokens {from}..{to} cannot be had: there are {}", side.len())));
    }
    Ok(Json(runs::tokens(&side.tokens[from..to])))
}

#[derive(Deserialize)]
pub(super) struct Rectangle {
    layer: usize,
    head: usize,
    rows: Option<String>,
    cols: Option<String>,
}

pub(super) async fn weights(
    axum::extract::State(state): All,
    Path(id): Path<String>,
    Query(asked): Query<Rectangle>,
) -> Answer {
    let run = find(&state, &id)?;
    let [n, m] = layer(&run, asked.layer)?.size();
    let (rows, cols) = (range(asked.rows.as_deref(), n)?, range(asked.cols.as_deref(), m)?);
    if rows.len().saturating_mul(cols.len()) > NUMBERS {
        let what = format!("{} × {} weights are too many at once", rows.len(), cols.len());
        return Err(Refusal::bad(what).hint("ask for tiles"));
    }
    let found = beside(&state.light, move || Ok(run.recording.layers[asked.layer].rectangle(asked.head, rows, cols)?));
    Ok(numbers(found.await?.data(), false))
}

#[derive(Deserialize)]
pub(super) struct Thumbnails {
    size: usize,
    pool: Option<String>,
}

/// Whether cells are means.
fn is_mean(pool: Option<&str>) -> Answer<bool> {
    match pool {
        None | Some("max") => Ok(false),
        Some("mean") => Ok(true),
        Some(other) => Err(Refusal::bad(format!("`{other}` is neither `max` nor `mean`"))),
    }
}

pub(super) async fn grid(
    axum::extract::State(state): All,
    Path(id): Path<String>,
    Query(asked): Query<Thumbnails>,
) -> Answer {
    let (run, size, mean) = (find(&state, &id)?, asked.size, is_mean(asked.pool.as_deref())?);
    let heads: usize = run.recording.layers.iter().map(crate::Layer::heads).sum();
    if size == 0 || size > THUMBNAIL || heads * size * size > THUMBNAILS {
        return Err(Refusal::bad(format!("{heads} thumbnails of {size} cells each way cannot be had")));
    }
    let sampled = run.recording.layers.iter().any(|layer| thumbnail_rows(layer, size).is_some());
    let known = run.grids.lock().expect("nobody panics while holding it").get(&(size, mean)).cloned();
    let cells = match known {
        Some(cells) => cells,
        None => {
            beside(&state.light, move || {
                let pool = if mean { qkv::Pool::Mean } else { qkv::Pool::Max };
                let mut all = Vec::with_capacity(heads * size * size);
                for layer in &run.recording.layers {
                    for head in 0..layer.heads() {
                        all.extend(thumbnail(layer, head, size, pool)?);
                    }
                }
                let cells: Arc<[f32]> = all.into();
                let mut grids = run.grids.lock().expect("nobody panics while holding it");
                if grids.len() >= GRIDS {
                    grids.clear();
                }
                grids.insert((size, mean), cells.clone());
                Ok(cells)
            })
            .await?
        }
    };
    Ok(numbers(&cells, sampled))
}

/// Pairs that a thumbnail looks at: of more, some rows.
const LOOKED: usize = 1 << 25;

/// How many rows of a cell are looked at, where not all are.
fn thumbnail_rows(layer: &crate::Layer, size: usize) -> Option<usize> {
    let [n, m] = layer.size();
    (n.saturating_mul(m) > LOOKED).then(|| (LOOKED / (size * m)).max(1))
}

fn thumbnail(layer: &crate::Layer, head: usize, size: usize, pool: qkv::Pool) -> qkv_models::Result<Vec<f32>> {
    let [n, m] = layer.size();
    let Some(most) = thumbnail_rows(layer, size) else {
        return Ok(layer.pooled(head, [size, size], pool)?.into_data());
    };
    let each = [n.div_ceil(size), m.div_ceil(size)];
    let cells = layer.map(head, 0..n, 0..m, each, pool, Some(most))?;
    let [height, width] = cells.shape();
    // The picture as large as it should be: the last cell repeats.
    let at = |y: usize, x: usize| cells[[y.min(height - 1), x.min(width - 1)]];
    Ok((0..size * size).map(|place| at(place / size, place % size)).collect())
}

#[derive(Deserialize)]
pub(super) struct AskedTile {
    layer: usize,
    head: usize,
    zoom: u32,
    x: usize,
    y: usize,
    pool: Option<String>,
    #[serde(default)]
    exact: u8,
}

pub(super) async fn tile(
    axum::extract::State(state): All,
    Path(id): Path<String>,
    Query(asked): Query<AskedTile>,
) -> Answer {
    let run = find(&state, &id)?;
    let AskedTile { layer: at, head, zoom, x, y, pool, exact } = asked;
    let tile = Tile { layer: at, head, zoom, x, y, mean: is_mean(pool.as_deref())? };
    let quick = tile.is_quick(layer(&run, at)?)?;
    if let Some(cells) = run.tiles.get(&tile) {
        return Ok(numbers(&cells, false));
    }
    // Whoever scrolls on does not wait for the rest.
    let waits = Arc::new(());
    let waiting = Arc::downgrade(&waits);
    let exactly = move |run: &Run| {
        // Someone may have asked for it while this one waited.
        if let Some(cells) = run.tiles.get(&tile) {
            return Ok(cells);
        }
        let cells: Arc<[f32]> = tile.exact(&run.recording.layers[at], &|| waiting.strong_count() > 0)?.into();
        run.tiles.keep(tile, cells.clone(), !quick);
        Ok(cells)
    };
    if quick {
        return Ok(numbers(&beside(&state.light, move || exactly(&run)).await?, false));
    }
    if exact == 0 {
        let cells = beside(&state.light, move || Ok(tile.sampled(&run.recording.layers[at])?)).await?;
        return Ok(numbers(&cells, true));
    }
    let cells = beside(&state.heavy, move || exactly(&run)).await?;
    drop(waits);
    Ok(numbers(&cells, false))
}

#[derive(Deserialize)]
pub(super) struct AskedPair {
    layer: usize,
    head: usize,
    query: usize,
    key: usize,
}

pub(super) async fn pair(
    axum::extract::State(state): All,
    Path(id): Path<String>,
    Query(AskedPair { layer: at, head, query, key }): Query<AskedPair>,
) -> Answer<Json<crate::Explained>> {
    let run = find(&state, &id)?;
    layer(&run, at)?;
    let found = beside(&state.light, move || Ok(crate::explain(&run.recording.layers[at], head, query, key)?));
    Ok(Json(found.await?))
}

pub(super) async fn heads(axum::extract::State(state): All, Path(id): Path<String>) -> Answer<Json<Value>> {
    let run = find(&state, &id)?;
    let all = state.clone();
    let told = beside(&state.light, move || {
        let measured = match run.heads.get() {
            Some(measured) => measured,
            None => {
                let mut measured = measures::measure(&run.recording, measures::THRESHOLD)?;
                let model = run.model.map(|model| &all.models[model].model);
                let importance = model.map(|model| model.importance(&run.recording, &all.machine)).transpose()?;
                if let Some(importance) = importance.flatten() {
                    measures::with_importance(&mut measured, &importance);
                }
                run.heads.get_or_init(|| measured)
            }
        };
        Ok(measured_as_told(&run.recording, measured))
    });
    Ok(Json(told.await?))
}

/// The table of heads as the page reads it.
pub(crate) fn measured_as_told(recording: &crate::Recording, measured: &[measures::Measured]) -> Value {
    let columns = MEASURES.iter().map(
        |measure| json!({ "id": measure.id, "name": measure.id, "formula": measure.formula, "unit": measure.unit }),
    );
    json!({
        "columns": columns.collect::<Vec<_>>(),
        "rows": measured,
        "sampled": measures::is_sampled(recording),
    })
}

#[derive(Deserialize)]
pub(super) struct AskedRollout {
    group: String,
    layers: Option<usize>,
    rows: Option<String>,
}

pub(super) async fn rollout(
    axum::extract::State(state): All,
    Path(id): Path<String>,
    Query(asked): Query<AskedRollout>,
) -> Answer {
    let run = find(&state, &id)?;
    let missing = || Refusal::missing(format!("there is no group `{}`", asked.group));
    let group = run.recording.groups().into_iter().find(|group| group.name == asked.group).ok_or_else(missing)?;
    let count = asked.layers.unwrap_or(group.layers.len());
    if count == 0 || count > group.layers.len() {
        return Err(Refusal::bad(format!("`{}` has {} layers", asked.group, group.layers.len())));
    }
    let layers = group.layers[..count].to_vec();
    let [n, m] = run.recording.layers[layers[0]].size();
    // Of all layers but the last, every row is computed.
    let heads: usize = layers[..count - 1].iter().map(|&layer| run.recording.layers[layer].heads()).sum();
    let rows = range(asked.rows.as_deref(), n)?;
    let work = n.saturating_mul(m).saturating_mul(heads + rows.len().saturating_mul(count - 1));
    if work > ROLLED {
        return Err(Refusal::bad("the rollout of so long an input takes minutes").hint("ask for fewer layers or rows"));
    }
    if rows.len().saturating_mul(m) > NUMBERS {
        return Err(Refusal::bad("the rollout is too large to show at once").hint("ask for fewer rows"));
    }
    let found = beside(&state.light, move || Ok(crate::rollout(&run.recording, &layers, rows)?)).await?;
    Ok::<Response, _>(numbers(found.data(), false))
}
