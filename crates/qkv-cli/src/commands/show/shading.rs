//! Documents and images, which are shown as what they are: words shaded, patches over the image. A document is drawn so unless a
//! layer is asked for; an image always, unless its tokens are.

use super::asked::Asked;
use super::chosen::layer;
use crate::failure::Failure;
use crate::terminal::Paper;
use qkv_explore::draw::{self, Shaded, Style, Theme};
use qkv_explore::{Form, Recording, shades};
use qkv_models::Reading;
use serde_json::json;

/// What is shaded.
enum Weighed {
    Document(Reading),
    /// Weights of patches, and what they are of.
    Image(Vec<f32>, String),
}

fn weighed(recording: &Recording, asked: &Asked) -> Result<Option<Weighed>, Failure> {
    match &recording.form {
        Some(Form::Document { .. }) if asked.layer.is_none() && asked.head.is_none() && !asked.tokens => {
            Ok(shades::document(recording)?.map(Weighed::Document))
        }
        Some(Form::Image { .. }) if !asked.tokens => {
            let chosen = match (&asked.layer, asked.head) {
                (Some(name), _) => Some(layer(recording, name)?),
                (None, Some(_)) => Some(recording.layers.len().saturating_sub(1)),
                (None, None) => None,
            };
            if let (Some(at), Some(head)) = (chosen, asked.head)
                && head >= recording.layers[at].heads()
            {
                let most = recording.layers[at].heads() - 1;
                return Err(Failure::new(format!("there is no head {head}"))
                    .hint(format!("its heads are 0 to {most}, or `mean`")));
            }
            let what = match (chosen, asked.head) {
                (None, _) => "rollout through all layers".to_owned(),
                (Some(at), Some(head)) => format!("{} · head {head}", super::chosen::short(recording, at)),
                (Some(at), None) => format!("{} · mean of heads", super::chosen::short(recording, at)),
            };
            Ok(shades::patches(recording, chosen, asked.head)?.map(|weights| Weighed::Image(weights, what)))
        }
        _ => Ok(None),
    }
}

/// For the terminal; `None` where there is a matrix to draw.
pub(super) fn drawn(recording: &Recording, asked: &Asked) -> Result<Option<String>, Failure> {
    let paper = Paper::of_stdout();
    let across = match &recording.form {
        Some(Form::Image { grid: [_, across], .. }) => *across,
        _ => 1,
    };
    Ok(weighed(recording, asked)?.map(|weighed| match weighed {
        Weighed::Document(read) => draw::document(&read, paper.width, paper.colours()),
        Weighed::Image(weights, what) => format!("{what}\n\n{}", draw::patches(&weights, across, paper.colours())),
    }))
}

/// For programs, one JSON object on a line; `None` where there is a matrix to tell.
pub(super) fn json(recording: &Recording, asked: &Asked) -> Result<Option<String>, Failure> {
    let output = &recording.output;
    Ok(match (weighed(recording, asked)?, &recording.form) {
        (Some(Weighed::Document(read)), _) => {
            Some(json!({ "text": recording.text, "output": output, "sentences": read.sentences }))
        }
        (Some(Weighed::Image(weights, what)), Some(Form::Image { grid: [_, across], .. })) => {
            let patches: Vec<&[f32]> = weights.chunks((*across).max(1)).collect();
            Some(json!({ "image": recording.text, "output": output, "of": what, "patches": patches }))
        }
        _ => None,
    }
    .map(|told| format!("{told}\n")))
}

/// For print; `None` where there is a matrix to draw.
pub(super) fn printed(recording: &Recording, asked: &Asked) -> Result<Option<Shaded>, Failure> {
    let theme = if asked.dark { Theme::Dark } else { Theme::Light };
    let style = Style { palette: asked.palette, theme, scale: asked.scale };
    let output = recording.output.as_deref().unwrap_or_default();
    Ok(match (weighed(recording, asked)?, &recording.form) {
        (Some(Weighed::Document(read)), _) => Some(Shaded::document(&read, output, style)),
        (Some(Weighed::Image(weights, what)), Some(form)) => {
            Some(Shaded::image(form, &weights, &format!("{} → {output} · {what}", recording.text), style)?)
        }
        _ => None,
    })
}
