//! News from places that do not exist: an event told in a few sentences with unrelated ones in between, its title, and
//! questions that the text answers. Names are built from syllables, so that most names in validation are new and must
//! be copied from the text. There is one right title, and one right answer to each question.

mod events;
mod names;

use super::{DEV, TRAIN};
use crate::draws::Draws;
use crate::labelled::Question;
use crate::text::corpus::Pair;

/// Separates stories for questions from those for titles.
const ASKED: u32 = 8;
/// Sentences unrelated to the event.
const ASIDES: [&str; 12] = [
    "In {elsewhere} the market was closed because of the wind",
    "{visitor}, {a_trade} from {elsewhere}, came to see it",
    "The evening was {weather}",
    "Nobody in {elsewhere} wanted to believe it at first",
    "A band from {elsewhere} played until midnight",
    "{visitor} had spoken of it for years",
    "The road to {elsewhere} was closed all day",
    "\"We did not expect this,\" said {visitor}, {a_trade}",
    "It had been {weather} for weeks",
    "The newspaper of {elsewhere} wrote about it too",
    "Two buses came from {elsewhere}",
    "Later that week it was {weather} again",
];

/// Names and values of the facts of a story.
type Facts = Vec<(&'static str, String)>;

/// An event: a title, and lists of sentences with facts in braces. A story has one sentence of each list.
struct StoryEvent {
    title: &'static str,
    sentences: &'static [&'static [&'static str]],
    /// Questions, and the facts that answer them.
    questions: &'static [(&'static str, &'static str)],
}

/// A story.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Story {
    title: String,
    text: String,
    /// Questions, each with the byte offset of the answer in the text, and the answer. Everything is ASCII.
    questions: Vec<(String, usize, String)>,
}

/// A story and its title.
pub(super) fn pair(draws: &mut Draws) -> Pair {
    let story = story(draws);
    Pair::new(story.text, story.title)
}

/// Questions for training and validation, several per story: a function of the seed.
///
/// ```
/// let (train, dev) = qkv_models::tasks::stories(7, 3, 2);
/// assert!(train.len() > 3 && dev.len() > 2);
/// let (start, answer) = &train[0].answers[0];
/// assert_eq!(&train[0].context[*start..][..answer.len()], answer);
/// ```
pub fn stories(seed: u64, train: usize, dev: usize) -> (Vec<Question>, Vec<Question>) {
    let some = |purpose: u32, count: usize| {
        let each = |at: u64| {
            let story = story(&mut Draws::new(seed, [purpose, at as u32, ASKED | ((at >> 32) as u32) << 8]));
            let question = move |(question, start, answer)| Question {
                question,
                context: story.text.clone(),
                answers: vec![(start, answer)],
            };
            story.questions.into_iter().map(question)
        };
        (0..count as u64).flat_map(each).collect()
    };
    (some(TRAIN, train), some(DEV, dev))
}

/// Generates a story.
fn story(draws: &mut Draws) -> Story {
    let (event, facts) = events::drawn(draws);
    let mut sentences: Vec<&str> = event.sentences.iter().map(|ways| draws.pick(ways)).collect();
    let mut asides = ASIDES;
    draws.shuffle(&mut asides);
    // Anywhere, even at the start: a story does not always begin with its event.
    for aside in &asides[..1 + draws.below(3)] {
        sentences.insert(draws.below(sentences.len() + 1), aside);
    }
    let (mut text, mut places) = (String::new(), Vec::new());
    for sentence in sentences {
        if !text.is_empty() {
            text.push(' ');
        }
        let start = text.len();
        write(sentence, &facts, &mut text, &mut places);
        capital(&mut text, start);
        text.push('.');
    }
    let filled = |pattern: &str| {
        let mut filled = String::new();
        write(pattern, &facts, &mut filled, &mut Vec::new());
        capital(&mut filled, 0);
        filled
    };
    // Only questions answered by one of the chosen sentences.
    let questions = event.questions.iter().filter_map(|(question, fact)| {
        let (_, start, end) = *places.iter().find(|(name, ..)| name == fact)?;
        Some((filled(question), start, text[start..end].to_owned()))
    });
    let questions = questions.collect();
    Story { title: filled(event.title), text, questions }
}

/// Writes a sentence with its facts, and records their byte ranges.
fn write(pattern: &str, facts: &Facts, text: &mut String, places: &mut Vec<(&'static str, usize, usize)>) {
    let mut rest = pattern;
    while let Some((before, behind)) = rest.split_once('{') {
        text.push_str(before);
        let (name, after) = behind.split_once('}').expect("a fact ends with a brace");
        let (name, fact) = facts.iter().find(|(known, _)| *known == name).expect("a story knows what it tells");
        places.push((name, text.len(), text.len() + fact.len()));
        text.push_str(fact);
        rest = after;
    }
    text.push_str(rest);
}

/// Capitalizes the start of a sentence.
fn capital(text: &mut str, at: usize) {
    if let Some(first) = text.get_mut(at..at + 1) {
        first.make_ascii_uppercase();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn answers_stand_where_they_are_said_to_and_every_story_is_asked_about() {
        let (train, dev) = stories(3, 2000, 100);
        for question in train.iter().chain(&dev) {
            let (start, answer) = &question.answers[0];
            assert_eq!(&question.context[*start..][..answer.len()], answer, "{question:?}");
            assert!(question.question.ends_with('?') && !question.question.contains('{'), "{}", question.question);
            assert!(question.context.is_ascii() && !question.context.contains('{'), "{}", question.context);
        }
        let texts: HashSet<&str> = train.iter().map(|question| question.context.as_str()).collect();
        assert_eq!(texts.len(), 2000, "every story has a question, and none is sentences twice");
        assert!(dev.iter().all(|question| !texts.contains(question.context.as_str())));
        assert_eq!(stories(3, 1, 0).0[..], train[..stories(3, 1, 0).0.len()]);
        assert_ne!(stories(4, 1, 0).0[0], train[0]);
    }

    #[test]
    fn a_question_has_one_answer() {
        for question in stories(5, 3000, 0).0 {
            let (_, answer) = &question.answers[0];
            // A question that contains its answer would answer itself.
            assert!(!question.question.contains(answer.as_str()), "{question:?}");
        }
    }

    #[test]
    fn a_title_is_made_of_what_the_text_says() {
        for at in 0..2000 {
            let story = story(&mut Draws::new(9, [TRAIN, at, 0]));
            // Names and numbers in the title: words that are not from its pattern.
            let said: HashSet<&str> = story.text.split(|c: char| !c.is_ascii_alphanumeric()).collect();
            for word in story.title.split([' ', ':']).filter(|word| word.len() > 1) {
                let name =
                    word.chars().all(|c| c.is_ascii_digit()) || names::is_name(word) && !story.title.starts_with(word);
                assert!(!name || said.contains(word), "`{word}` of `{}` in `{}`", story.title, story.text);
            }
        }
    }
}
