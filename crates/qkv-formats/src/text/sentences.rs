//! Sentence splitting by rules. Every line break ends a sentence. A text with `<s>` between its sentences is split
//! there; any other, after full stops, question and exclamation marks and the closing quotes and brackets that follow.
//!
//! Abbreviations such as `Dr.` and initials do not end a sentence, nor does a mark before a lower-case letter if the
//! text has capitals.

use std::ops::Range;

/// Separates sentences in some corpora.
const MARK: &str = "<s>";
/// Abbreviations, in lower case.
const SHORT: &[&str] = &["mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "e.g", "i.e", "etc", "cf", "approx"];
/// Abbreviations before a number.
const NUMBERED: &[&str] = &["no", "vol", "fig"];

/// Whether a mark ends a sentence if a space follows.
fn ends(c: char) -> bool {
    matches!(c, '.' | '!' | '?' | '…')
}

/// Whether a mark ends a sentence, with or without a space.
fn ends_at_once(c: char) -> bool {
    matches!(c, '。' | '！' | '？' | '｡')
}

/// Quotes and brackets that belong to the sentence they close.
fn closes(c: char) -> bool {
    matches!(c, '"' | '\'' | ')' | ']' | '}' | '”' | '’' | '»' | '」' | '』' | '）' | '】')
}

/// Byte ranges of the sentences of a text, trimmed, none of them empty.
///
/// ```
/// use qkv_formats::text::sentences::sentences;
///
/// let text = "Dr. Ada slept. \"Why?\" asked nobody. 真的吗？是。";
/// let found: Vec<&str> = sentences(text).into_iter().map(|range| &text[range]).collect();
/// assert_eq!(found, ["Dr. Ada slept.", "\"Why?\" asked nobody.", "真的吗？", "是。"]);
/// let marked: Vec<_> = sentences("a film . . . <s> twice !").into_iter().collect();
/// assert_eq!(marked, [0..12, 17..24]);
/// ```
pub fn sentences(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let marked = text.contains(MARK);
    let capitals = text.chars().any(char::is_uppercase);
    for line in lines(text) {
        if marked {
            split_at_marks(text, line, &mut found);
        } else {
            split_at_ends(text, line, capitals, &mut found);
        }
    }
    found
}

/// The lines of a text.
fn lines(text: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut from = 0;
    text.split_inclusive('\n').map(move |line| {
        let range = from..from + line.len();
        from = range.end;
        range
    })
}

/// Adds a trimmed range, unless it is empty.
fn push(text: &str, range: Range<usize>, found: &mut Vec<Range<usize>>) {
    let part = &text[range.clone()];
    let start = range.start + part.len() - part.trim_start().len();
    let end = start + part.trim().len();
    if start < end {
        found.push(start..end);
    }
}

fn split_at_marks(text: &str, line: Range<usize>, found: &mut Vec<Range<usize>>) {
    let mut from = line.start;
    for (at, mark) in text[line.clone()].match_indices(MARK) {
        push(text, from..line.start + at, found);
        from = line.start + at + mark.len();
    }
    push(text, from..line.end, found);
}

fn split_at_ends(text: &str, line: Range<usize>, capitals: bool, found: &mut Vec<Range<usize>>) {
    let mut from = line.start;
    let mut rest = text[line.clone()].char_indices().map(|(at, c)| (line.start + at, c)).peekable();
    while let Some((at, c)) = rest.next() {
        if !ends(c) && !ends_at_once(c) {
            continue;
        }
        // Consecutive marks, quotes and brackets belong together.
        let (mut end, mut last) = (at + c.len_utf8(), c);
        while let Some(&(next, c)) = rest.peek()
            && (ends(c) || ends_at_once(c) || closes(c))
        {
            (end, last) = (next + c.len_utf8(), c);
            rest.next();
        }
        let after = text[end..line.end].trim_start();
        let spaced = after.len() < line.end - end || after.is_empty();
        let next = after.chars().next();
        let goes_on = next.is_some_and(|next| ends(next) || (capitals && next.is_lowercase()));
        let done = ends_at_once(c) || ends_at_once(last);
        if done || (spaced && !goes_on && !(c == '.' && is_short(&text[from..at], next))) {
            push(text, from..end, found);
            from = end;
        }
    }
    push(text, from..line.end, found);
}

/// Whether the word before a full stop is an abbreviation or an initial.
fn is_short(before: &str, next: Option<char>) -> bool {
    let word = before.rsplit(char::is_whitespace).next().unwrap_or(before).trim_start_matches(['(', '"', '\'', '“']);
    let mut letters = word.chars();
    let initial = matches!((letters.next(), letters.next()), (Some(c), None) if c.is_uppercase());
    let (word, number) = (word.to_lowercase(), next.is_some_and(|c| c.is_ascii_digit()));
    initial || SHORT.contains(&word.as_str()) || (number && NUMBERED.contains(&word.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(text: &str) -> Vec<&str> {
        sentences(text).into_iter().map(|range| &text[range]).collect()
    }

    #[test]
    fn a_sentence_ends_with_its_signs_and_what_closes_behind_them() {
        assert_eq!(cut("He left (at last!) Then rain..."), ["He left (at last!)", "Then rain..."]);
        assert_eq!(cut("What?! No. \"Yes.\" Fine"), ["What?!", "No.", "\"Yes.\"", "Fine"]);
        assert_eq!(
            cut("it cost 3.50 and a.b.c stayed. so did he ."),
            ["it cost 3.50 and a.b.c stayed.", "so did he ."]
        );
    }

    #[test]
    fn initials_and_abbreviations_end_nothing() {
        assert_eq!(cut("J. R. Smith met Mr. Jones. They spoke."), ["J. R. Smith met Mr. Jones.", "They spoke."]);
        assert_eq!(cut("Apples, e.g. red ones. Pears"), ["Apples, e.g. red ones.", "Pears"]);
        assert_eq!(cut("See No. 5. No. 6 is gone. No. Never."), ["See No. 5.", "No. 6 is gone.", "No.", "Never."]);
    }

    #[test]
    fn lines_and_marks_are_taken_at_their_word() {
        assert_eq!(cut("one\n\n two \r\nthree"), ["one", "two", "three"]);
        assert_eq!(cut("a . b <s><s> c? d"), ["a . b", "c? d"]);
        assert_eq!(cut(" \n "), [""; 0]);
    }

    proptest! {
        #[test]
        fn nothing_but_space_and_marks_is_lost(text in "[a-cA-C .!?。<>s\n\"é]{0,60}") {
            let ranges = sentences(&text);
            prop_assert!(ranges.windows(2).all(|two| two[0].end <= two[1].start));
            // Joined with spaces, as adjacent sentences could form a mark.
            let kept: Vec<&str> = ranges.iter().map(|range| &text[range.clone()]).collect();
            let kept = kept.join(" ");
            let bare = |text: &str| text.replace(MARK, "").split_whitespace().collect::<String>();
            prop_assert_eq!(bare(&kept), bare(&text));
        }
    }
}
