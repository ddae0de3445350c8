//! The handlers of the API. Every number comes from the library; handlers check the request and schedule the work.

use super::answer::{ApiError, ApiResult, numbers};
use super::runs::{self, Run};
use super::tiles::Tile;
use super::{AppState, ServedModel};
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

type Shared = axum::extract::State<Arc<AppState>>;

/// Maximum values in one response.
const MAX_VALUES: usize = 1 << 20;
/// Maximum cells per side of a thumbnail, and cells of all thumbnails together.
const MAX_THUMBNAIL: usize = 256;
const MAX_THUMBNAIL_CELLS: usize = 16 << 20;
/// Thumbnail sizes cached per run.
const MAX_GRIDS: usize = 6;
/// Maximum weights that a rollout reads, which takes some seconds.
const MAX_ROLLOUT_WEIGHTS: usize = 1 << 33;
/// How long a request waits for its turn to compute.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `work` on a blocking thread as soon as `turns` has a permit.
pub(super) async fn compute<T: Send + 'static>(
    turns: &Arc<Semaphore>,
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let busy = |_| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is busy computing").hint("try again");
    let turn = tokio::time::timeout(QUEUE_TIMEOUT, turns.clone().acquire_owned()).await.map_err(busy)?;
    // The permit lives as long as the work, not the request: a client that leaves does not make room for more work.
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    })
    .await;
    let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the computation failed");
    done.map_err(failed)?
}

pub(super) fn find_run(state: &AppState, id: &str) -> ApiResult<Arc<Run>> {
    let run = id.parse().ok().and_then(|id| state.runs.get(id));
    run.ok_or_else(|| ApiError::not_found(format!("there is no run `{id}`")).hint("run the text again"))
}

fn find_layer(run: &Run, layer: usize) -> ApiResult<&crate::Layer> {
    let missing = || ApiError::not_found(format!("there is no layer {layer}"));
    run.recording.layers.get(layer).ok_or_else(missing)
}

/// Parses `3..7`.
pub(super) fn range(text: Option<&str>, limit: usize) -> ApiResult<Range<usize>> {
    let Some(text) = text else { return Ok(0..limit) };
    let parsed = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    match parsed {
        Some(range) if range.start <= range.end && range.end <= limit => Ok(range),
        _ => Err(ApiError::bad_request(format!("`{text}` is not a range within 0..{limit}")).hint("write `3..7`")),
    }
}

pub(super) fn state_json(state: &AppState) -> Value {
    let models = state.models.iter().enumerate().map(|(id, ServedModel { name, note, model })| {
        json!({
            "id": id, "name": name, "note": note, "verb": model.verb(), "inputs": model.inputs(),
            "takes_text": true, "takes_target": model.takes_target(),
        })
    });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "models": models.collect::<Vec<_>>(),
        "first": 0,
        "examples": state.examples,
    })
}

pub(super) async fn state(axum::extract::State(state): Shared) -> Json<Value> {
    Json(state_json(&state))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunRequest {
    #[serde(default)]
    model: usize,
    text: String,
    #[serde(default)]
    target: Option<String>,
}

pub(super) async fn new_run(
    axum::extract::State(state): Shared,
    request: Result<Json<RunRequest>, JsonRejection>,
) -> ApiResult<Json<Value>> {
    let Json(RunRequest { model, text, target }) =
        request.map_err(|e| ApiError::new(e.status(), e.body_text()).hint("send {\"text\": \"…\"}"))?;
    if model >= state.models.len() {
        return Err(ApiError::not_found(format!("there is no model {model}")));
    }
    for (name, text) in [("text", Some(&text)), ("target", target.as_ref())] {
        let most = state.models[model].model.max_chars();
        if let Some(text) = text.filter(|text| text.chars().nth(most).is_some()) {
            let length = text.chars().count();
            let what = format!("the {name} has {length} characters; the maximum is {most}");
            return Err(ApiError::bad_request(what).hint("send one sentence at a time"));
        }
    }
    let one_line = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (text, target) = (one_line(text), target.map(one_line));
    let all = state.clone();
    let recording =
        compute(&state.light, move || Ok(all.models[model].model.record(&text, target.as_deref(), &all.machine)?))
            .await?;
    Ok(Json(state.runs.add(recording, Some(model)).to_json()))
}

pub(super) async fn run(axum::extract::State(state): Shared, Path(id): Path<String>) -> ApiResult<Json<Value>> {
    Ok(Json(find_run(&state, &id)?.to_json()))
}

#[derive(Deserialize)]
pub(super) struct TokenQuery {
    side: usize,
    from: usize,
    to: usize,
}

pub(super) async fn tokens(
    axum::extract::State(state): Shared,
    Path(id): Path<String>,
    Query(TokenQuery { side, from, to }): Query<TokenQuery>,
) -> ApiResult<Json<Value>> {
    let run = find_run(&state, &id)?;
    let missing = || ApiError::not_found(format!("there is no side {side}"));
    let side = run.recording.sides.get(side).ok_or_else(missing)?;
    if from > to || to > side.len() || to - from > MAX_VALUES / 64 {
        let what = format!("tokens {from}..{to} are too many or out of range: the side has {}", side.len());
        return Err(ApiError::bad_request(what));
    }
    Ok(Json(runs::tokens_json(&side.tokens[from..to])))
}

#[derive(Deserialize)]
pub(super) struct WeightsQuery {
    layer: usize,
    head: usize,
    rows: Option<String>,
    cols: Option<String>,
}

pub(super) async fn weights(
    axum::extract::State(state): Shared,
    Path(id): Path<String>,
    Query(query): Query<WeightsQuery>,
) -> ApiResult {
    let run = find_run(&state, &id)?;
    let [n, m] = find_layer(&run, query.layer)?.size();
    let (rows, cols) = (range(query.rows.as_deref(), n)?, range(query.cols.as_deref(), m)?);
    if rows.len().saturating_mul(cols.len()) > MAX_VALUES {
        let what = format!("{} × {} weights are too many for one response", rows.len(), cols.len());
        return Err(ApiError::bad_request(what).hint("request tiles"));
    }
    let weights =
        compute(&state.light, move || Ok(run.recording.layers[query.layer].rectangle(query.head, rows, cols)?));
    Ok(numbers(weights.await?.data(), false))
}

#[derive(Deserialize)]
pub(super) struct GridQuery {
    size: usize,
    pool: Option<String>,
}

/// Whether a cell is the mean, rather than the maximum, of its weights.
fn is_mean(pool: Option<&str>) -> ApiResult<bool> {
    match pool {
        None | Some("max") => Ok(false),
        Some("mean") => Ok(true),
        Some(other) => Err(ApiError::bad_request(format!("`{other}` is neither `max` nor `mean`"))),
    }
}

pub(super) async fn grid(
    axum::extract::State(state): Shared,
    Path(id): Path<String>,
    Query(query): Query<GridQuery>,
) -> ApiResult {
    let (run, size, mean) = (find_run(&state, &id)?, query.size, is_mean(query.pool.as_deref())?);
    let heads: usize = run.recording.layers.iter().map(crate::Layer::heads).sum();
    if size == 0 || size > MAX_THUMBNAIL || heads * size * size > MAX_THUMBNAIL_CELLS {
        return Err(ApiError::bad_request(format!("{heads} thumbnails of {size} × {size} cells are out of range")));
    }
    let sampled = run.recording.layers.iter().any(|layer| thumbnail_rows(layer, size).is_some());
    let cached = run.grids.lock().expect("not poisoned").get(&(size, mean)).cloned();
    let cells = match cached {
        Some(cells) => cells,
        None => {
            compute(&state.light, move || {
                let pool = if mean { qkv::Pool::Mean } else { qkv::Pool::Max };
                let mut all = Vec::with_capacity(heads * size * size);
                for layer in &run.recording.layers {
                    for head in 0..layer.heads() {
                        all.extend(thumbnail(layer, head, size, pool)?);
                    }
                }
                let cells: Arc<[f32]> = all.into();
                let mut grids = run.grids.lock().expect("not poisoned");
                if grids.len() >= MAX_GRIDS {
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

/// Pairs beyond which a thumbnail is computed from a sample of its rows.
const THUMBNAIL_PAIRS: usize = 1 << 25;

/// Sampled rows per cell; `None` if all rows are read.
fn thumbnail_rows(layer: &crate::Layer, size: usize) -> Option<usize> {
    let [n, m] = layer.size();
    (n.saturating_mul(m) > THUMBNAIL_PAIRS).then(|| (THUMBNAIL_PAIRS / (size * m)).max(1))
}

fn thumbnail(layer: &crate::Layer, head: usize, size: usize, pool: qkv::Pool) -> qkv_models::Result<Vec<f32>> {
    let [n, m] = layer.size();
    let Some(max_rows) = thumbnail_rows(layer, size) else {
        return Ok(layer.pooled(head, [size, size], pool)?.into_data());
    };
    let each = [n.div_ceil(size), m.div_ceil(size)];
    let cells = layer.map(head, 0..n, 0..m, each, pool, Some(max_rows))?;
    let [height, width] = cells.shape();
    // The map may be smaller than the thumbnail: its last cell repeats.
    let at = |y: usize, x: usize| cells[[y.min(height - 1), x.min(width - 1)]];
    Ok((0..size * size).map(|place| at(place / size, place % size)).collect())
}

#[derive(Deserialize)]
pub(super) struct TileQuery {
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
    axum::extract::State(state): Shared,
    Path(id): Path<String>,
    Query(query): Query<TileQuery>,
) -> ApiResult {
    let run = find_run(&state, &id)?;
    let TileQuery { layer: at, head, zoom, x, y, pool, exact } = query;
    let tile = Tile { layer: at, head, zoom, x, y, mean: is_mean(pool.as_deref())? };
    let quick = tile.is_quick(find_layer(&run, at)?)?;
    if let Some(cells) = run.tiles.get(&tile) {
        return Ok(numbers(&cells, false));
    }
    // Dropped with the request: when the client leaves, the work stops.
    let request = Arc::new(());
    let waiting = Arc::downgrade(&request);
    let exactly = move |run: &Run| {
        // Another request may have computed it in the meantime.
        if let Some(cells) = run.tiles.get(&tile) {
            return Ok(cells);
        }
        let cells: Arc<[f32]> = tile.exact(&run.recording.layers[at], &|| waiting.strong_count() > 0)?.into();
        run.tiles.insert(tile, cells.clone(), !quick);
        Ok(cells)
    };
    if quick {
        return Ok(numbers(&compute(&state.light, move || exactly(&run)).await?, false));
    }
    if exact == 0 {
        let cells = compute(&state.light, move || Ok(tile.sampled(&run.recording.layers[at])?)).await?;
        return Ok(numbers(&cells, true));
    }
    let cells = compute(&state.heavy, move || exactly(&run)).await?;
    drop(request);
    Ok(numbers(&cells, false))
}

#[derive(Deserialize)]
pub(super) struct PairQuery {
    layer: usize,
    head: usize,
    query: usize,
    key: usize,
}

pub(super) async fn pair(
    axum::extract::State(state): Shared,
    Path(id): Path<String>,
    Query(PairQuery { layer: at, head, query, key }): Query<PairQuery>,
) -> ApiResult<Json<crate::PairExplanation>> {
    let run = find_run(&state, &id)?;
    find_layer(&run, at)?;
    let explanation = compute(&state.light, move || Ok(crate::explain(&run.recording.layers[at], head, query, key)?));
    Ok(Json(explanation.await?))
}

pub(super) async fn heads(axum::extract::State(state): Shared, Path(id): Path<String>) -> ApiResult<Json<Value>> {
    let run = find_run(&state, &id)?;
    let all = state.clone();
    let table = compute(&state.light, move || {
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
        Ok(measures_json(&run.recording, measured))
    });
    Ok(Json(table.await?))
}

/// The table of head measures.
pub(crate) fn measures_json(recording: &crate::Recording, measured: &[measures::HeadMeasures]) -> Value {
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
pub(super) struct RolloutQuery {
    group: String,
    layers: Option<usize>,
    rows: Option<String>,
}

pub(super) async fn rollout(
    axum::extract::State(state): Shared,
    Path(id): Path<String>,
    Query(query): Query<RolloutQuery>,
) -> ApiResult {
    let run = find_run(&state, &id)?;
    let missing = || ApiError::not_found(format!("there is no group `{}`", query.group));
    let group = run.recording.groups().into_iter().find(|group| group.name == query.group).ok_or_else(missing)?;
    let count = query.layers.unwrap_or(group.layers.len());
    if count == 0 || count > group.layers.len() {
        return Err(ApiError::bad_request(format!("`{}` has {} layers", query.group, group.layers.len())));
    }
    let layers = group.layers[..count].to_vec();
    let [n, m] = run.recording.layers[layers[0]].size();
    // Every layer but the last is computed for all rows.
    let heads: usize = layers[..count - 1].iter().map(|&layer| run.recording.layers[layer].heads()).sum();
    let rows = range(query.rows.as_deref(), n)?;
    let work = n.saturating_mul(m).saturating_mul(heads + rows.len().saturating_mul(count - 1));
    if work > MAX_ROLLOUT_WEIGHTS {
        let what = "a rollout over an input of this length takes minutes";
        return Err(ApiError::bad_request(what).hint("request fewer layers or rows"));
    }
    if rows.len().saturating_mul(m) > MAX_VALUES {
        return Err(ApiError::bad_request("the rollout is too large for one response").hint("request fewer rows"));
    }
    let rolled = compute(&state.light, move || Ok(crate::rollout(&run.recording, &layers, rows)?)).await?;
    Ok::<Response, _>(numbers(rolled.data(), false))
}
