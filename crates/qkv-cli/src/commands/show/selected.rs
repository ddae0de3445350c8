//! Which attention was meant: a layer by its name, one head or the mean of all, and its weights.

use super::asked::Asked;
use crate::failure::Failure;
use qkv_explore::draw::{Picture, Theme};
use qkv_explore::{Agreement, Cut, Matrix, Recording};
use serde::Serialize;

/// Weights that are drawn one by one; of more, cells of a picture, so many each way.
const MOST: usize = 4 << 20;
const CELLS: usize = 256;

/// The attention that is shown.
pub(crate) struct Chosen {
    /// Its place in the recording.
    layer: usize,
    head: Option<usize>,
    pub matrix: Matrix,
    /// Weights that a cell covers each way; above 1 it is a picture, and no data.
    each: usize,
    /// In a few words: which layer, which heads.
    pub title: String,
}

/// The same as JSON.
#[derive(Serialize)]
struct Object<'a> {
    text: &'a str,
    output: Option<&'a str>,
    layer: String,
    name: &'a str,
    /// Null for the mean of all.
    head: Option<usize>,
    #[serde(flatten)]
    matrix: &'a Matrix,
    pharaoh: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    agreement: Option<Agreement>,
}

/// A layer as people type it: `cross.2`.
pub(crate) fn short(recording: &Recording, layer: usize) -> String {
    let groups = recording.groups();
    let within = |group: &qkv_explore::Group| {
        let at = group.layers.iter().position(|&other| other == layer)?;
        Some(format!("{}.{at}", group.name))
    };
    groups.iter().find_map(within).unwrap_or_default()
}

/// The layer of that name, whole or short; a group by itself where it has one layer.
pub(super) fn layer(recording: &Recording, name: &str) -> Result<usize, Failure> {
    let shorts: Vec<String> = (0..recording.layers.len()).map(|at| short(recording, at)).collect();
    let whole = recording.layers.iter().position(|layer| layer.name == name);
    let alone = || {
        let group = recording.groups().into_iter().find(|group| group.name == name)?;
        (group.layers.len() == 1).then(|| group.layers[0])
    };
    whole.or_else(|| shorts.iter().position(|short| short == name)).or_else(alone).ok_or_else(|| {
        Failure::new(format!("there is no layer `{name}`")).hint(format!("the layers are {}", shorts.join(", ")))
    })
}

impl Chosen {
    pub fn of(recording: &Recording, asked: &Asked) -> Result<Chosen, Failure> {
        let layer = match &asked.layer {
            Some(name) => layer(recording, name)?,
            None => recording.first_to_look_at(),
        };
        let (of, short) = (&recording.layers[layer], short(recording, layer));
        let heads = of.heads();
        if let Some(head) = asked.head.filter(|&head| head >= heads) {
            return Err(Failure::new(format!("`{short}` has no head {head}"))
                .hint(format!("its heads are 0 to {}, or `mean`", heads - 1)));
        }
        let cut = Cut { head: asked.head, words: !asked.tokens, text_only: !asked.special, ..Cut::default() };
        let (matrix, each) = match of.size() {
            [n, m] if n.saturating_mul(m) <= MOST => (Matrix::of(recording, layer, &cut)?, 1),
            [n, m] => {
                let each = n.max(m).div_ceil(CELLS);
                (Matrix::from_afar(recording, layer, asked.head, each)?, each)
            }
        };
        if matrix.rows.is_empty() || matrix.columns.is_empty() {
            return Err(Failure::new("one side has no words to draw").hint("`--special` draws starts and ends too"));
        }
        let head = match (asked.head, heads) {
            (Some(head), _) => format!("head {head}"),
            (None, 1) => "one head".into(),
            (None, heads) => format!("mean of {heads} heads"),
        };
        let mut title = format!("{short} · {head} · {}", of.description());
        if each > 1 {
            let of = if asked.head.is_some() || heads == 1 { "largest" } else { "mean over heads of the largest" };
            title += &format!(" · each cell the {of} of {each} × {each} weights");
        }
        Ok(Chosen { layer, head: asked.head, matrix, each, title })
    }

    /// The weights themselves: where there are too many, there is a picture alone.
    pub fn weights(&self) -> Result<&Matrix, Failure> {
        match self.each {
            1 => Ok(&self.matrix),
            _ => Err(Failure::new(format!("these are more than the {MOST} weights that are told one by one"))
                .hint("draw a picture: in the terminal, or as `.svg` or `.png`")),
        }
    }

    /// As it is drawn.
    pub fn picture(&self, asked: &Asked) -> Picture {
        Picture {
            matrix: self.matrix.clone(),
            title: Some(self.title.clone()),
            scale: asked.scale,
            palette: asked.palette,
            theme: if asked.dark { Theme::Dark } else { Theme::Light },
        }
    }

    /// How well it agrees with the links that were given.
    pub fn agreement(&self, asked: &Asked) -> Result<Option<Agreement>, Failure> {
        asked.links.as_ref().map(|links| Ok(self.weights()?.agreement(links))).transpose()
    }

    /// As one JSON object on a line.
    pub fn json(&self, recording: &Recording, asked: &Asked) -> Result<String, Failure> {
        let object = Object {
            text: &recording.text,
            output: recording.output.as_deref(),
            layer: short(recording, self.layer),
            name: &recording.layers[self.layer].name,
            head: self.head,
            matrix: self.weights()?,
            pharaoh: self.matrix.pharaoh(),
            agreement: self.agreement(asked)?,
        };
        Ok(serde_json::to_string(&object).expect("plain data") + "\n")
    }
}
