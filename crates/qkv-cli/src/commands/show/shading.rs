//! Documents with shaded words and images with shaded patches. A document is shaded unless a layer, a head or
//! `--tokens` is selected, an image unless `--tokens` is.

use super::args::ShowArgs;
use super::selected::{find_layer, short_name};
use crate::failure::Failure;
use crate::terminal::TerminalStyle;
use qkv_explore::draw::{self, Shaded, Style, Theme};
use qkv_explore::{Form, Recording, token_weights};
use qkv_models::Reading;
use serde_json::json;

/// Weights over an input.
enum Shading {
    Document(Reading),
    /// Patch weights, and the layer and heads they come from.
    Image(Vec<f32>, String),
}

fn shading(recording: &Recording, args: &ShowArgs) -> Result<Option<Shading>, Failure> {
    match &recording.form {
        Some(Form::Document { .. }) if args.layer.is_none() && args.head.is_none() && !args.tokens => {
            Ok(token_weights::document(recording)?.map(Shading::Document))
        }
        Some(Form::Image { .. }) if !args.tokens => {
            let chosen = match (&args.layer, args.head) {
                (Some(name), _) => Some(find_layer(recording, name)?),
                (None, Some(_)) => Some(recording.layers.len().saturating_sub(1)),
                (None, None) => None,
            };
            if let (Some(at), Some(head)) = (chosen, args.head)
                && head >= recording.layers[at].heads()
            {
                let most = recording.layers[at].heads() - 1;
                return Err(Failure::new(format!("there is no head {head}"))
                    .hint(format!("its heads are 0 to {most}, or `mean`")));
            }
            let what = match (chosen, args.head) {
                (None, _) => "rollout through all layers".to_owned(),
                (Some(at), Some(head)) => format!("{} · head {head}", short_name(recording, at)),
                (Some(at), None) => format!("{} · mean of heads", short_name(recording, at)),
            };
            Ok(token_weights::patches(recording, chosen, args.head)?.map(|weights| Shading::Image(weights, what)))
        }
        _ => Ok(None),
    }
}

/// The drawing for the terminal; `None` if a matrix is drawn instead.
pub(super) fn draw(recording: &Recording, args: &ShowArgs) -> Result<Option<String>, Failure> {
    let style = TerminalStyle::of_stdout();
    let across = match &recording.form {
        Some(Form::Image { grid: [_, across], .. }) => *across,
        _ => 1,
    };
    Ok(shading(recording, args)?.map(|shading| match shading {
        Shading::Document(read) => draw::document(&read, style.width, style.colors()),
        Shading::Image(weights, what) => format!("{what}\n\n{}", draw::patches(&weights, across, style.colors())),
    }))
}

/// One JSON object, on one line; `None` if a matrix is shown instead.
pub(super) fn to_json(recording: &Recording, args: &ShowArgs) -> Result<Option<String>, Failure> {
    let output = &recording.output;
    Ok(match (shading(recording, args)?, &recording.form) {
        (Some(Shading::Document(read)), _) => {
            Some(json!({ "text": recording.text, "output": output, "sentences": read.sentences }))
        }
        (Some(Shading::Image(weights, what)), Some(Form::Image { grid: [_, across], .. })) => {
            let patches: Vec<&[f32]> = weights.chunks((*across).max(1)).collect();
            Some(json!({ "image": recording.text, "output": output, "of": what, "patches": patches }))
        }
        _ => None,
    }
    .map(|object| format!("{object}\n")))
}

/// The picture for a file; `None` if a matrix is drawn instead.
pub(super) fn picture(recording: &Recording, args: &ShowArgs) -> Result<Option<Shaded>, Failure> {
    let theme = if args.dark { Theme::Dark } else { Theme::Light };
    let look = Style { palette: args.palette, theme, scale: args.scale };
    let output = recording.output.as_deref().unwrap_or_default();
    Ok(match (shading(recording, args)?, &recording.form) {
        (Some(Shading::Document(read)), _) => Some(Shaded::document(&read, output, look)),
        (Some(Shading::Image(weights, what)), Some(form)) => {
            Some(Shaded::image(form, &weights, &format!("{} → {output} · {what}", recording.text), look)?)
        }
        _ => None,
    })
}
