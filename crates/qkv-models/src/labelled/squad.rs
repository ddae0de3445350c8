//! Questions about texts in the format of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250).

use crate::files::packed;
use crate::{Error, Result};
use serde::Deserialize;
use std::path::Path;

/// A question about a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The question.
    pub question: String,
    /// The text.
    pub context: String,
    /// Reference answers: their first character in the text, and their text.
    pub answers: Vec<(usize, String)>,
}

#[derive(Deserialize)]
struct SquadFile {
    data: Vec<Article>,
}

#[derive(Deserialize)]
struct Article {
    paragraphs: Vec<Paragraph>,
}

#[derive(Deserialize)]
struct Paragraph {
    context: String,
    qas: Vec<SquadQuestion>,
}

#[derive(Deserialize)]
struct SquadQuestion {
    question: String,
    #[serde(default)]
    answers: Vec<SquadAnswer>,
    #[serde(default)]
    is_impossible: bool,
}

#[derive(Deserialize)]
struct SquadAnswer {
    text: String,
    answer_start: usize,
}

/// Reads all questions that have an answer.
pub(super) fn read(path: &Path) -> Result<Vec<Question>> {
    let bytes = packed::bytes(path, u64::MAX)?;
    let file: SquadFile =
        serde_json::from_slice(&bytes).map_err(|e| Error::line(path, e.line().max(1), e.to_string()))?;
    let mut found = Vec::new();
    for paragraph in file.data.into_iter().flat_map(|article| article.paragraphs) {
        for asked in paragraph.qas {
            if asked.is_impossible || asked.answers.is_empty() {
                continue;
            }
            let mut answers = Vec::with_capacity(asked.answers.len());
            for SquadAnswer { text, answer_start } in asked.answers {
                let there = paragraph.context.chars().skip(answer_start).take(text.chars().count()).eq(text.chars());
                if !there || text.is_empty() {
                    let what = format!("the answer `{text}` is not at character {answer_start} of its text");
                    return Err(Error::format(path, format!("question `{}`", asked.question), what));
                }
                answers.push((answer_start, text));
            }
            found.push(Question { question: asked.question, context: paragraph.context.clone(), answers });
        }
    }
    if found.is_empty() {
        return Err(Error::format(path, "field `data`", "it has no question with an answer"));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_not_where_it_should_be_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let file = |start: usize| {
            format!(
                r#"{{"data":[{{"paragraphs":[{{"context":"Ådas cat is in Oslo","qas":[{{"question":"Where?","answers":[{{"text":"Oslo","answer_start":{start}}}]}}]}}]}}]}}"#
            )
        };
        std::fs::write(&path, file(15)).unwrap();
        assert_eq!(read(&path).unwrap()[0].answers, [(15, "Oslo".to_owned())], "in characters, not bytes");
        std::fs::write(&path, file(usize::MAX)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("question `Where?`"));
        std::fs::write(&path, r#"{"data":[]}"#).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("no question"));
    }
}
