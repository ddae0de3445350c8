//! The runs that the page can show: each a recording, with the results that were computed for it so far.

use super::tiles::TileCache;
use crate::measures::HeadMeasures;
use crate::recording::{Form, Recording, Token};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock};

/// Runs kept in memory, tens of megabytes each for long texts. The least recently used is dropped, except run 0.
const MAX_RUNS: usize = 32;
/// Sides with at most this many tokens are sent with the run; the page requests the tokens of longer ones as it needs
/// them.
const INLINE_TOKENS: usize = 4096;

/// A recording with its cached results.
#[derive(Debug)]
pub(super) struct Run {
    pub id: u64,
    pub recording: Recording,
    /// Index of the model that was run.
    pub model: Option<usize>,
    pub tiles: TileCache,
    pub heads: OnceLock<Vec<HeadMeasures>>,
    pub grids: Grids,
}

/// Thumbnails of all heads, by size and by whether a cell is the mean (or else the maximum).
pub(super) type Grids = Mutex<HashMap<(usize, bool), Arc<[f32]>>>;

/// All runs, least recently used ones dropped.
#[derive(Debug, Default)]
pub(super) struct Runs(Mutex<RunCache>);

#[derive(Debug, Default)]
struct RunCache {
    next_id: u64,
    clock: u64,
    /// When each run was last used, and the run.
    runs: BTreeMap<u64, (u64, Arc<Run>)>,
}

impl Runs {
    pub fn add(&self, recording: Recording, model: Option<usize>) -> Arc<Run> {
        let mut cache = self.0.lock().expect("not poisoned");
        let id = cache.next_id;
        cache.next_id += 1;
        if cache.runs.len() >= MAX_RUNS
            && let Some((&oldest, _)) = cache.runs.iter().filter(|(id, _)| **id != 0).min_by_key(|(_, (used, _))| *used)
        {
            cache.runs.remove(&oldest);
        }
        let (heads, grids) = (OnceLock::new(), Mutex::default());
        let run = Arc::new(Run { id, recording, model, tiles: TileCache::default(), heads, grids });
        cache.clock += 1;
        let now = cache.clock;
        cache.runs.insert(id, (now, run.clone()));
        run
    }

    pub fn get(&self, id: u64) -> Option<Arc<Run>> {
        let mut cache = self.0.lock().expect("not poisoned");
        cache.clock += 1;
        let now = cache.clock;
        let (used, run) = cache.runs.get_mut(&id)?;
        *used = now;
        Some(run.clone())
    }
}

pub(super) fn tokens_json(tokens: &[Token]) -> Value {
    let one = |token: &Token| json!({ "text": token.text, "word": token.word, "special": token.special });
    tokens.iter().map(one).collect()
}

fn form_json(form: &Form) -> Value {
    match form {
        Form::Document { words, sentences, lengths } => {
            json!({ "kind": "document", "words": words, "sentences": sentences, "lengths": lengths })
        }
        Form::Image { grid, width, height, points } => {
            let points = base64::encode(points);
            json!({ "kind": "image", "grid": grid, "width": width, "height": height, "points": points })
        }
        Form::Sound { side, step, frames, frame, points, words, heads } => {
            let points = base64::encode(points);
            json!({
                "kind": "sound", "side": side, "step": step, "frames": frames, "frame": frame, "points": points,
                "words": words, "heads": heads,
            })
        }
    }
}

/// The description of a recording that the page reads. `server` is whether a server can answer further requests.
pub(crate) fn recording_json(recording: &Recording, server: bool) -> Value {
    let sides = recording.sides.iter().map(|side| {
        let mut object = json!({ "name": side.name, "count": side.len() });
        if side.len() <= INLINE_TOKENS {
            object["tokens"] = tokens_json(&side.tokens);
        }
        object
    });
    let groups = recording.groups();
    let index_in_group = |at: usize| groups.iter().find_map(|group| group.layers.iter().position(|&layer| layer == at));
    let layers = recording.layers.iter().enumerate().map(|(at, layer)| {
        let ([n, m], heads) = (layer.size(), layer.heads());
        let call = layer.call();
        let width = call.map_or(0, |call| call.inputs.q.shape()[3]);
        let causal = call.is_some_and(|call| call.attention.mask.uses(&qkv::Mask::causal()));
        let mut attention = layer.description();
        if width > 0 {
            attention += &format!(" · {heads} {} of {width}", if heads == 1 { "head" } else { "heads" });
        }
        json!({
            "name": layer.name, "group": layer.group, "index": index_in_group(at), "heads": heads,
            "queries": layer.queries,
            "keys": layer.keys, "n": n, "m": m, "causal": causal, "attention": attention, "width": width,
        })
    });
    let self_attention = (0..recording.layers.len()).any(|at| recording.is_self_attention(at));
    let steps = if recording.steps.is_empty() { Value::Null } else { json!(recording.steps) };
    json!({
        "text": recording.text,
        "output": recording.output,
        "sides": sides.collect::<Vec<_>>(),
        "layers": layers.collect::<Vec<_>>(),
        "groups": groups,
        "steps": steps,
        "form": recording.form.as_ref().map(form_json),
        "can": {
            "pair": server && recording.layers.iter().all(|layer| layer.call().is_some()),
            "rollout": server && self_attention,
            "heads": true,
            "export": server,
            "importance": recording.layers.iter().all(|layer| layer.importance.is_some()),
        },
    })
}

impl Run {
    pub fn to_json(&self) -> Value {
        let mut object = recording_json(&self.recording, true);
        object["id"] = json!(self.id);
        object["model"] = json!(self.model);
        object["can"]["importance"] = json!(self.model.is_some() && !self.recording.steps.is_empty());
        object
    }
}
