//! The attention that is shown: a layer by its name, one head or the mean of all, and its weights.

use super::args::ShowArgs;
use crate::failure::Failure;
use qkv_explore::draw::{Picture, Theme};
use qkv_explore::{Agreement, Matrix, MatrixOptions, Recording};
use serde::Serialize;

/// The most weights drawn one by one.
const MOST: usize = 4 << 20;
/// Cells per side in a picture of more weights than that.
const CELLS: usize = 256;

/// The attention that is shown.
pub(crate) struct SelectedAttention {
    /// Index in the recording.
    layer: usize,
    head: Option<usize>,
    pub matrix: Matrix,
    /// Weights per cell along each side; above 1, cells are maxima rather than weights.
    each: usize,
    /// Layer, heads and mechanism in a few words.
    pub title: String,
}

/// The JSON of an attention matrix.
#[derive(Serialize)]
struct AttentionJson<'a> {
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

/// The short name of a layer: `cross.2`.
pub(crate) fn short_name(recording: &Recording, layer: usize) -> String {
    let groups = recording.groups();
    let within = |group: &qkv_explore::Group| {
        let at = group.layers.iter().position(|&other| other == layer)?;
        Some(format!("{}.{at}", group.name))
    };
    groups.iter().find_map(within).unwrap_or_default()
}

/// Finds a layer by its full or short name, or by its group if that has one layer.
pub(super) fn find_layer(recording: &Recording, name: &str) -> Result<usize, Failure> {
    let shorts: Vec<String> = (0..recording.layers.len()).map(|at| short_name(recording, at)).collect();
    let whole = recording.layers.iter().position(|layer| layer.name == name);
    let alone = || {
        let group = recording.groups().into_iter().find(|group| group.name == name)?;
        (group.layers.len() == 1).then(|| group.layers[0])
    };
    whole.or_else(|| shorts.iter().position(|short| short == name)).or_else(alone).ok_or_else(|| {
        Failure::new(format!("there is no layer `{name}`")).hint(format!("the layers are {}", shorts.join(", ")))
    })
}

impl SelectedAttention {
    pub fn of(recording: &Recording, args: &ShowArgs) -> Result<SelectedAttention, Failure> {
        let layer = match &args.layer {
            Some(name) => find_layer(recording, name)?,
            None => recording.default_layer(),
        };
        let (of, short) = (&recording.layers[layer], short_name(recording, layer));
        let heads = of.heads();
        if let Some(head) = args.head.filter(|&head| head >= heads) {
            return Err(Failure::new(format!("`{short}` has no head {head}"))
                .hint(format!("its heads are 0 to {}, or `mean`", heads - 1)));
        }
        let options = MatrixOptions {
            head: args.head,
            words: !args.tokens,
            text_only: !args.special,
            ..MatrixOptions::default()
        };
        let (matrix, each) = match of.size() {
            [n, m] if n.saturating_mul(m) <= MOST => (Matrix::of(recording, layer, &options)?, 1),
            [n, m] => {
                let each = n.max(m).div_ceil(CELLS);
                (Matrix::pooled(recording, layer, args.head, each)?, each)
            }
        };
        if matrix.rows.is_empty() || matrix.columns.is_empty() {
            return Err(Failure::new("one side has no words to draw").hint("`--special` shows starts and ends too"));
        }
        let head = match (args.head, heads) {
            (Some(head), _) => format!("head {head}"),
            (None, 1) => "one head".into(),
            (None, heads) => format!("mean of {heads} heads"),
        };
        let mut title = format!("{short} · {head} · {}", of.description());
        if each > 1 {
            let of = if args.head.is_some() || heads == 1 { "largest" } else { "mean over heads of the largest" };
            title += &format!(" · each cell the {of} of {each} × {each} weights");
        }
        Ok(SelectedAttention { layer, head: args.head, matrix, each, title })
    }

    /// The weights themselves; if there are too many, they can only be drawn.
    pub fn weights(&self) -> Result<&Matrix, Failure> {
        match self.each {
            1 => Ok(&self.matrix),
            _ => Err(Failure::new(format!("more than {MOST} weights can be drawn but not listed"))
                .hint("draw a picture: in the terminal, or as `.svg` or `.png`")),
        }
    }

    /// The picture.
    pub fn picture(&self, args: &ShowArgs) -> Picture {
        Picture {
            matrix: self.matrix.clone(),
            title: Some(self.title.clone()),
            scale: args.scale,
            palette: args.palette,
            theme: if args.dark { Theme::Dark } else { Theme::Light },
        }
    }

    /// Agreement with the links of `--links`.
    pub fn agreement(&self, args: &ShowArgs) -> Result<Option<Agreement>, Failure> {
        args.links.as_ref().map(|links| Ok(self.weights()?.agreement(links))).transpose()
    }

    /// One JSON object, on one line.
    pub fn to_json(&self, recording: &Recording, args: &ShowArgs) -> Result<String, Failure> {
        let object = AttentionJson {
            text: &recording.text,
            output: recording.output.as_deref(),
            layer: short_name(recording, self.layer),
            name: &recording.layers[self.layer].name,
            head: self.head,
            matrix: self.weights()?,
            pharaoh: self.matrix.pharaoh(),
            agreement: self.agreement(args)?,
        };
        Ok(serde_json::to_string(&object).expect("plain data") + "\n")
    }
}
