//! The runs that the page can look at: each a recording, with what was computed of it so far.

use super::page::base64;
use super::tiles::Tiles;
use crate::measures::Measured;
use crate::recording::{Form, Recording, Token};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock};

/// Runs that are kept, some tens of megabytes each where texts are long; what was asked for longest ago goes first, the very
/// first stays.
const KEPT: usize = 32;
/// Tokens that are told with a run; of longer sides the page asks for what it shows.
const TOLD: usize = 4096;

/// A run that can be looked at.
#[derive(Debug)]
pub(super) struct Run {
    pub id: u64,
    pub recording: Recording,
    /// The model that it is of.
    pub model: Option<usize>,
    pub tiles: Tiles,
    pub heads: OnceLock<Vec<Measured>>,
    pub grids: Grids,
}

/// Thumbnails of all heads, by their size and by whether cells are means.
pub(super) type Grids = Mutex<HashMap<(usize, bool), Arc<[f32]>>>;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Runs(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    next: u64,
    used: u64,
    runs: BTreeMap<u64, (u64, Arc<Run>)>,
}

impl Runs {
    pub fn add(&self, recording: Recording, model: Option<usize>) -> Arc<Run> {
        let mut kept = self.0.lock().expect("nobody panics while holding it");
        let id = kept.next;
        kept.next += 1;
        if kept.runs.len() >= KEPT
            && let Some((&oldest, _)) = kept.runs.iter().filter(|(id, _)| **id != 0).min_by_key(|(_, (used, _))| *used)
        {
            kept.runs.remove(&oldest);
        }
        let (heads, grids) = (OnceLock::new(), Mutex::default());
        let run = Arc::new(Run { id, recording, model, tiles: Tiles::default(), heads, grids });
        kept.used += 1;
        let now = kept.used;
        kept.runs.insert(id, (now, run.clone()));
        run
    }

    pub fn get(&self, id: u64) -> Option<Arc<Run>> {
        let mut kept = self.0.lock().expect("nobody panics while holding it");
        kept.used += 1;
        let now = kept.used;
        let (used, run) = kept.runs.get_mut(&id)?;
        *used = now;
        Some(run.clone())
    }
}

/// Tokens as the page reads them.
pub(super) fn tokens(tokens: &[Token]) -> Value {
    let one = |token: &Token| json!({ "text": token.text, "word": token.word, "special": token.special });
    tokens.iter().map(one).collect()
}

/// What the tokens are parts of, as the page reads it.
fn form(form: &Form) -> Value {
    match form {
        Form::Document { words, sentences, lengths } => {
            json!({ "kind": "document", "words": words, "sentences": sentences, "lengths": lengths })
        }
        Form::Image { grid, width, height, points } => {
            let points = base64(points.iter().copied());
            json!({ "kind": "image", "grid": grid, "width": width, "height": height, "points": points })
        }
    }
}

/// All that is told of a recording, by whatever name.
pub(crate) fn described(recording: &Recording, server: bool) -> Value {
    let sides = recording.sides.iter().map(|side| {
        let mut told = json!({ "name": side.name, "count": side.len() });
        if side.len() <= TOLD {
            told["tokens"] = tokens(&side.tokens);
        }
        told
    });
    let groups = recording.groups();
    let place = |at: usize| groups.iter().find_map(|group| group.layers.iter().position(|&layer| layer == at));
    let layers = recording.layers.iter().enumerate().map(|(at, layer)| {
        let ([n, m], heads) = (layer.size(), layer.heads());
        let computed = layer.computed();
        let width = computed.map_or(0, |call| call.inputs.q.shape()[3]);
        let causal = computed.is_some_and(|call| call.attention.mask.uses(&qkv::Mask::causal()));
        let mut attention = layer.description();
        if width > 0 {
            attention += &format!(" · {heads} {} of {width}", if heads == 1 { "head" } else { "heads" });
        }
        json!({
            "name": layer.name, "group": layer.group, "index": place(at), "heads": heads, "queries": layer.queries,
            "keys": layer.keys, "n": n, "m": m, "causal": causal, "attention": attention, "width": width,
        })
    });
    let own = (0..recording.layers.len()).any(|at| recording.is_own(at));
    let steps = if recording.steps.is_empty() { Value::Null } else { json!(recording.steps) };
    json!({
        "text": recording.text,
        "output": recording.output,
        "sides": sides.collect::<Vec<_>>(),
        "layers": layers.collect::<Vec<_>>(),
        "groups": groups,
        "steps": steps,
        "form": recording.form.as_ref().map(form),
        "can": {
            "pair": server && recording.layers.iter().all(|layer| layer.computed().is_some()),
            "rollout": server && own,
            "heads": true,
            "export": server,
            "importance": recording.layers.iter().all(|layer| layer.importance.is_some()),
        },
    })
}

impl Run {
    /// As the page reads it.
    pub fn told(&self) -> Value {
        let mut told = described(&self.recording, true);
        told["id"] = json!(self.id);
        told["model"] = json!(self.model);
        told["can"]["importance"] = json!(self.model.is_some() && !self.recording.steps.is_empty());
        told
    }
}
