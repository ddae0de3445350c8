//! Scores of labels and of text, as lines in the form of seqeval's report or as one JSON object.

use qkv_models::Evaluation;
use serde_json::json;
use std::path::Path;

/// One JSON object, on one line.
pub(super) fn to_json(model: &Path, found: &Evaluation) -> String {
    let mut report = json!(found);
    report["model"] = json!(model.display().to_string());
    format!("{report}\n")
}

/// A few lines: a table by class, then the overall scores.
pub(super) fn to_text(found: &Evaluation) -> String {
    let mut text = String::new();
    let width = found.classes.iter().map(|class| class.name.chars().count()).max().unwrap_or(0).max(5);
    if !found.classes.is_empty() {
        text += &format!("{:width$}  precision  recall     F1  support\n", "");
    }
    for class in &found.classes {
        let (name, precision, recall, f1, support) =
            (&class.name, class.precision, class.recall, class.f1, class.support);
        text += &format!("{name:width$}  {precision:9.2}  {recall:6.2}  {f1:5.2}  {support:7}\n");
    }
    match found.measured {
        "tags" => {
            let [precision, recall] = found.precision_recall.unwrap_or_default();
            let (f1, right) = (found.f1.unwrap_or(0.0), found.accuracy.unwrap_or(0.0));
            text += &format!("entity F1 = {f1:.2} (precision {precision:.2}, recall {recall:.2})\n");
            text += &format!("tag accuracy = {right:.2} % ({} sentences)\n", found.items);
        }
        "classes" => {
            let (accuracy, f1) = (found.accuracy.unwrap_or(0.0), found.f1.unwrap_or(0.0));
            text += &format!("accuracy = {accuracy:.2} % ({} texts), mean F1 = {f1:.2}\n", found.items);
        }
        "images" => {
            let (accuracy, f1) = (found.accuracy.unwrap_or(0.0), found.f1.unwrap_or(0.0));
            text += &format!("accuracy = {accuracy:.2} % ({} images), mean F1 = {f1:.2}\n", found.items);
        }
        "questions" => {
            text += &format!("accuracy = {:.2} % ({} questions)\n", found.accuracy.unwrap_or(0.0), found.items);
        }
        "descriptions" => {
            let (bleu, cider) = (found.bleu.unwrap_or(0.0), found.cider.unwrap_or(0.0));
            text += &format!("BLEU = {bleu:.2}, CIDEr-D = {cider:.2} ({} images)\n", found.items);
            let (exact, similarity) = (found.exact.unwrap_or(0.0), found.edit_similarity.unwrap_or(0.0));
            text += &format!("exact match = {exact:.2} %, edit similarity = {similarity:.2} %\n");
        }
        "boxes" => {
            let width = found.ap50_classes.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
            for (name, precision) in &found.ap50_classes {
                text += &format!("{name:width$}  AP50 {precision:6.2}\n");
            }
            let (half, mean) = (found.ap50.unwrap_or(0.0), found.ap.unwrap_or(0.0));
            text += &format!("AP50 = {half:.2}, AP = {mean:.2} ({} images)\n", found.items);
        }
        "answers" => {
            let (exact, f1) = (found.exact.unwrap_or(0.0), found.f1.unwrap_or(0.0));
            text += &format!("exact match = {exact:.2} %, F1 = {f1:.2} ({} questions)\n", found.items);
        }
        _ => {
            let (loss, perplexity) = (found.loss.unwrap_or(0.0), found.perplexity.unwrap_or(0.0));
            text += &format!("loss = {loss:.4} per token, perplexity = {perplexity:.3} ({} tokens)\n", found.items);
        }
    }
    text
}
