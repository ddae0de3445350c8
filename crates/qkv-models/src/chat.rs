//! Chat templates: a model's Jinja template renders a conversation, which is then tokenized. Only the template produces
//! special tokens; what a person writes is tokenized as text, whatever it contains.

use crate::files::folder::{CHAT_TEMPLATE, TOKENIZER_CONFIG, read_json_if_present};
use crate::files::{input, packed};
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Steps that a template may take; those of real models take a few hundred per message.
const FUEL: u64 = 1_000_000;
/// Placeholders for messages in the rendered text: characters of a private-use plane.
const OPEN: char = '\u{f0000}';
const CLOSE: char = '\u{f0001}';

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Its author: `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// A message of a role.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Message { role: role.to_owned(), content: content.into() }
    }
}

/// A chat template.
///
/// ```
/// use qkv_models::chat::{Message, Template};
/// let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
///               {% if add_generation_prompt %}<assistant>{% endif %}";
/// let template = Template::new(source, "tokenizer_config.json")?;
/// assert_eq!(template.render(&[Message::new("user", "Hello!")], "<s>", "</s>")?, "<user>Hello!<assistant>");
/// # Ok::<(), qkv_models::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
    place: String,
}

const NAME: &str = "chat";

impl Template {
    /// Parses a template; `path` is for errors.
    ///
    /// # Errors
    /// If its syntax is wrong.
    pub fn new(source: &str, path: impl AsRef<Path>) -> Result<Self> {
        Self::called(source, path.as_ref().display().to_string())
    }

    fn called(source: &str, place: String) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |what: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, what))
        });
        let wrong = |e: minijinja::Error| Error::format(&place, "chat template", e.to_string());
        environment.add_template_owned(NAME, source.to_owned()).map_err(wrong)?;
        Ok(Template { environment, source: source.to_owned(), place })
    }

    /// Its source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation up to the point where the model answers.
    ///
    /// # Errors
    /// If the template refuses the messages, such as two in a row with the same role.
    pub fn render(&self, messages: &[Message], bos: &str, eos: &str) -> Result<String> {
        self.render_for(messages, bos, eos, true)
    }

    fn render_for(&self, messages: &[Message], bos: &str, eos: &str, add_generation_prompt: bool) -> Result<String> {
        let wrong = |e: minijinja::Error| Error::format(&self.place, "chat template", e.to_string());
        let template = self.environment.get_template(NAME).map_err(wrong)?;
        let around = context! { messages, add_generation_prompt, bos_token => bos, eos_token => eos };
        template.render(around).map_err(wrong)
    }

    /// Tokens of a conversation up to the point where the model answers.
    ///
    /// # Errors
    /// As [`render`](Template::render).
    pub fn encode(&self, messages: &[Message], tokenizer: &Tokenizer, bos: u32, eos: u32) -> Result<Vec<u32>> {
        self.tokens(messages, tokenizer, [bos, eos], true)
    }

    /// Tokens of a whole conversation, and which of them the model has to generate: the answers of the assistant with
    /// their end tokens.
    ///
    /// # Errors
    /// As [`render`](Template::render).
    pub fn encode_answers(
        &self,
        messages: &[Message],
        tokenizer: &Tokenizer,
        specials: [u32; 2],
    ) -> Result<(Vec<u32>, Vec<bool>)> {
        let whole = self.tokens(messages, tokenizer, specials, false)?;
        let marks: Vec<u32> = tokenizer.specials().into_iter().map(|(_, id)| id).collect();
        let shared = |other: &[u32]| other.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        let mut answers = vec![false; whole.len()];
        for at in (0..messages.len()).filter(|&at| messages[at].role == "assistant") {
            let start = match at {
                0 => 0,
                _ => shared(&self.tokens(&messages[..at], tokenizer, specials, true)?),
            };
            let end = shared(&self.tokens(&messages[..=at], tokenizer, specials, false)?).max(start);
            // A line break after the end token of an answer belongs to the template.
            let end = (start..end).rev().find(|&place| marks.contains(&whole[place])).map_or(end, |place| place + 1);
            answers[start..end].fill(true);
        }
        Ok((whole, answers))
    }

    fn tokens(
        &self,
        messages: &[Message],
        tokenizer: &Tokenizer,
        [bos, eos]: [u32; 2],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>> {
        // Messages are inserted only after special tokens have been recognized.
        let stand_ins: Vec<Message> = (messages.iter().enumerate())
            .map(|(at, message)| Message::new(&message.role, format!("{OPEN}{at}{CLOSE}")))
            .collect();
        let name = |id| tokenizer.name(id).unwrap_or_default();
        let rendered = self.render_for(&stand_ins, &name(bos), &name(eos), add_generation_prompt)?;
        let specials = tokenizer.specials();
        let (mut ids, mut text, mut rest) = (Vec::new(), String::new(), &rendered[..]);
        while let Some(next) = rest.chars().next() {
            if let Some((special, id)) = specials.iter().find(|(special, _)| rest.starts_with(special.as_str())) {
                ids.extend(tokenizer.encode(&std::mem::take(&mut text)));
                ids.push(*id);
                rest = &rest[special.len()..];
                continue;
            }
            let said = rest.strip_prefix(OPEN).and_then(|rest| rest.split_once(CLOSE));
            if let Some((at, after)) = said
                && let Some(message) = at.parse().ok().and_then(|at: usize| messages.get(at))
            {
                text += &message.content;
                rest = after;
                continue;
            }
            text.push(next);
            rest = &rest[next.len_utf8()..];
        }
        ids.extend(tokenizer.encode(&text));
        Ok(ids)
    }
}

/// Reads conversations from JSON Lines: an object with `messages`, each with a `role` and a `content`, per line.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("a.jsonl");
/// let line = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}"#;
/// std::fs::write(&path, line).unwrap();
/// assert_eq!(qkv_models::chat::conversations(&path)?[0][1].content, "Hello!");
/// # Ok::<(), qkv_models::Error>(())
/// ```
///
/// # Errors
/// Names the file and the line.
pub fn conversations(path: &Path) -> Result<Vec<Vec<Message>>> {
    #[derive(Deserialize)]
    struct Conversation {
        messages: Vec<Message>,
    }
    let text = packed::text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(at, line): (usize, &str)| {
        let Conversation { messages } =
            serde_json::from_str(line).map_err(|e| Error::line(path, at + 1, e.to_string()))?;
        match messages.iter().any(|message| message.role == "assistant") {
            true => Ok(messages),
            false => Err(Error::line(path, at + 1, "no message is the assistant's")),
        }
    };
    lines.map(read).collect()
}

/// The chat template of a model's folder: in its own file, or in the settings of the tokenizer.
pub(crate) fn of_folder(folder: &Path) -> Result<Option<Template>> {
    #[derive(Deserialize)]
    struct Settings {
        chat_template: Option<Templates>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Templates {
        One(String),
        Named(Vec<NamedTemplate>),
    }
    #[derive(Deserialize)]
    struct NamedTemplate {
        name: String,
        template: String,
    }
    let alone = folder.join(CHAT_TEMPLATE);
    if alone.exists() {
        let source = input::read_to_string(&alone, input::SETTINGS_MAX)?;
        return Template::new(&source, alone).map(Some);
    }
    let path = folder.join(TOKENIZER_CONFIG);
    let Some(settings) = read_json_if_present::<Settings>(&path)? else { return Ok(None) };
    let source = match settings.chat_template {
        Some(Templates::One(source)) => Some(source),
        Some(Templates::Named(all)) => all.into_iter().find(|one| one.name == "default").map(|one| one.template),
        None => None,
    };
    source.map(|source| Template::new(&source, &path)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        let error = Template::new(source, "t").unwrap().render(&[], "", "").unwrap_err();
        assert!(error.to_string().contains("fuel"), "{error}");
    }

    #[test]
    fn answers_are_what_the_assistant_says_with_its_end() {
        let template = Template::new(
            "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}",
            "t",
        )
        .unwrap();
        let tokenizer =
            Tokenizer::train(["user assistant\nHi Yes No"; 3], crate::text::tokenizer::Kind::Characters).unwrap();
        let said = [("user", "Hi"), ("assistant", "Yes"), ("user", "Hi"), ("assistant", "No")];
        let messages: Vec<Message> = said.iter().map(|(role, content)| Message::new(role, *content)).collect();
        let specials = [tokenizer.bos(), tokenizer.eos()];
        let (ids, answers) = template.encode_answers(&messages, &tokenizer, specials).unwrap();
        let wanted: Vec<u32> = ids.iter().zip(&answers).filter(|(_, answer)| **answer).map(|(id, _)| *id).collect();
        let [yes, no] = ["Yes", "No"].map(|text| tokenizer.encode(text));
        assert_eq!(wanted, [&yes[..], &[tokenizer.eos()], &no[..], &[tokenizer.eos()]].concat());
    }

    #[test]
    fn a_template_can_refuse_and_python_methods_are_known() {
        let template = Template::new("{{ messages[0]['content'].strip() }}{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}", "t").unwrap();
        let one = [Message::new("user", " a ")];
        assert_eq!(template.render(&one, "", "").unwrap(), "a");
        let two = [one[0].clone(), one[0].clone()];
        assert!(template.render(&two, "", "").unwrap_err().to_string().contains("one at a time"));
        assert!(Template::new("{% for %}", "t").unwrap_err().to_string().starts_with("`t`: chat template: "));
    }
}
