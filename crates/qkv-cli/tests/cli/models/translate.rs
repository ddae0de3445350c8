//! `qkv translate`: one output line per input line, from any source and in any format.

use crate::models::program::{Folder, json, model};
use std::io::{BufRead, BufReader, Read, Write};

fn translate(words: &str, stdin: &str) -> String {
    Folder::new().qkv_on(&format!("translate --model {} {words}", model()), stdin).quietly()
}

#[test]
fn arguments_stdin_and_a_file_give_the_same_lines() {
    let folder = Folder::new();
    folder.put("in.txt", b"abc\n12z\nq\n");
    let from_stdin = translate("", "abc\n12z\nq\n");
    assert_eq!(from_stdin.lines().count(), 3);
    assert_eq!(translate("abc 12z q", ""), from_stdin);
    assert_eq!(folder.qkv(&format!("translate --model {} --input in.txt", model())).quietly(), from_stdin);
    let to_file = folder.qkv(&format!("translate --model {} --input in.txt --output out.txt", model())).quietly();
    assert_eq!((to_file, folder.text("out.txt")), (String::new(), from_stdin));
}

#[test]
fn an_empty_line_stays_an_empty_line() {
    let out = translate("", "\nabc\n\n  \r\nabc");
    let lines: Vec<&str> = out.split('\n').collect();
    assert_eq!(lines.len(), 6, "{out:?}");
    assert_eq!([lines[0], lines[2], lines[3], lines[5]], [""; 4]);
    assert!(!lines[1].is_empty() && lines[1] == lines[4]);
    assert_eq!(translate("", ""), "");
    let objects = json(&translate("--json --align", "\nab\n"));
    assert_eq!((&objects[0]["translation"], &objects[0]["line"]), (&"".into(), &1.into()));
    assert!(objects[0]["alignment"].is_null() && !objects[1]["alignment"].is_null());
}

#[test]
fn a_line_is_answered_before_the_next_one_is_written() {
    let mut child = Folder::new().command(&["translate", "--model", model(), "--greedy"]).spawn().unwrap();
    let (mut stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut stdout = BufReader::new(stdout);
    for text in ["abc\n", "\n", "xyz\n"] {
        stdin.write_all(text.as_bytes()).unwrap();
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line.ends_with('\n') && line != "\n", text != "\n", "{line:?}");
    }
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = Folder::new().command(&["translate", "--model", model(), "--greedy"]).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || drop(stdin.write_all("abc\n".repeat(5000).as_bytes())));
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1]).unwrap();
    drop(stdout);
    writer.join().unwrap();
    let ran = child.wait_with_output().unwrap();
    assert_eq!((ran.status.code(), String::from_utf8(ran.stderr).unwrap()), (Some(0), String::new()));
}

#[test]
fn json_has_tokens_scores_alternatives_and_alignment() {
    let out = translate("--json --n-best 3 --align=pharaoh ab1 c", "");
    let [first, second] = &json(&out)[..] else { panic!("two lines: {out}") };
    assert_eq!((&first["source"], &second["source"]), (&"ab1".into(), &"c".into()));
    assert_eq!(first["source_tokens"], serde_json::json!(["a", "b", "1"]));
    assert_eq!(first["alternatives"].as_array().unwrap().len(), 2);
    let (score, next) = (first["score"].as_f64().unwrap(), first["alternatives"][0]["score"].as_f64().unwrap());
    assert!(score >= next && first["log_probability"].as_f64().unwrap() < 0.0);
    let joined: String =
        first["target_tokens"].as_array().unwrap().iter().map(|piece| piece.as_str().unwrap()).collect();
    assert_eq!(first["translation"].as_str().unwrap().replace(' ', ""), joined);
    let alignment = &first["alignment"];
    let (words, rows) = (alignment["target"].as_array().unwrap(), alignment["weights"].as_array().unwrap());
    assert_eq!(words.len(), rows.len());
    for row in rows {
        let sum: f64 = row.as_array().unwrap().iter().map(|weight| weight.as_f64().unwrap()).sum();
        assert!(sum > 0.0 && sum < 1.0 + 1e-5, "{row}");
    }
    assert!(alignment["pharaoh"].as_str().unwrap().starts_with("0-0"), "one source word: {alignment}");
}

#[test]
fn columns_come_in_their_order() {
    let best = translate("abc", "");
    let scored = translate("--scores abc", "");
    let [score, text] = scored.trim_end().split('\t').collect::<Vec<_>>()[..] else { panic!("{scored:?}") };
    assert!(score.parse::<f64>().unwrap() < 0.0 && text == best.trim_end());
    let many = translate("--n-best 3 --beam 4 abc 12", "");
    let rows: Vec<Vec<&str>> = many.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), ["1", "1", "1", "2", "2", "2"]);
    assert!(rows[0][1].parse::<f64>().unwrap() >= rows[1][1].parse::<f64>().unwrap());
    let linked = translate("--align=pharaoh abc", "");
    let [text, links] = linked.trim_end().split('\t').collect::<Vec<_>>()[..] else { panic!("{linked:?}") };
    assert!(text == best.trim_end() && links.split(' ').all(|link| link.split_once('-').is_some()), "{linked}");
}

#[test]
fn an_alignment_is_drawn_under_its_line_without_color_where_nobody_sees_it() {
    let out = translate("--align abc", "");
    assert!(!out.contains('\x1b') && out.lines().count() > 3, "{out}");
    assert!(out.lines().nth(2).unwrap().contains("abc"), "{out}");
    assert!(out.contains(['░', '▒', '▓', '█']), "{out}");
    assert_eq!(translate("--align=none abc", ""), translate("abc", ""));
}

#[test]
fn searches_do_what_they_say() {
    let greedy = translate("--greedy abcd 123", "");
    assert_eq!(translate("--beam 1 abcd 123", ""), greedy);
    assert_eq!(translate("--greedy --no-cache abcd 123", ""), greedy, "the cache changes nothing");
    assert_eq!(translate("--greedy --threads 1 abcd 123", ""), greedy);
    assert_eq!(translate("--sample --top-k 1 abcd 123", ""), greedy, "one token to draw from");
    let drawn = translate("--sample --temperature 2 --seed 5 abcd 123", "");
    assert_eq!(translate("--sample --temperature 2 --seed 5 abcd 123", ""), drawn);
    assert_ne!(translate("--sample --temperature 2 --seed 6 abcd 123", ""), drawn);
    let objects = json(&translate("--json --max-length 3 abcdef", ""));
    assert!(objects[0]["target_tokens"].as_array().unwrap().len() <= 3);
    let tokens = json(&translate("--json --no-repeat 1 abcdef", ""))[0]["target_tokens"].as_array().unwrap().clone();
    assert!(tokens.iter().enumerate().all(|(at, token)| !tokens[..at].contains(token)), "{tokens:?}");
    let first: String = greedy.chars().next().into_iter().collect();
    assert_eq!(translate(&format!("--greedy --stop {first} abcd"), ""), "\n");
}

#[test]
fn what_is_drawn_does_not_depend_on_how_lines_arrive() {
    let text = "abc\n\nabc\nabc\n12\n";
    let whole = translate("--sample --temperature 2", text);
    let mut child =
        Folder::new().command(&["translate", "--model", model(), "--sample", "--temperature", "2"]).spawn().unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut parts = String::new();
    for line in text.lines() {
        writeln!(stdin, "{line}").unwrap();
        stdout.read_line(&mut parts).unwrap();
    }
    drop(stdin);
    child.wait().unwrap();
    assert_eq!(parts, whole);
}

#[test]
fn a_line_that_cannot_be_translated_is_named() {
    let folder = Folder::new();
    let typed = format!("translate --model {} --greedy", model());
    let ran = folder.qkv_on(&typed, format!("abc\n{}\n", "a".repeat(50)));
    assert!(ran.err.contains("stdin:2: the line has 50 tokens, the model takes at most 39"), "{}", ran.err);
    assert!(ran.err.contains("hint: split it into sentences") && ran.code == Some(1));
    let ran = folder.qkv_on(&typed, b"abc\n\xff\n");
    assert!(ran.code == Some(1) && ran.err.contains("stdin:2: byte 1 of the line is not UTF-8"), "{}", ran.err);
    folder.qkv(&format!("{typed} --input none.txt")).fails(&["cannot open `none.txt`", "hint: check the path"]);
    folder.put("in.txt", b"abc\n");
    folder
        .qkv(&format!("{typed} --input in.txt --output in.txt"))
        .fails(&["`in.txt`: cannot be written: it is the input"]);
    assert_eq!(folder.text("in.txt"), "abc\n");
}

#[test]
fn misuse_is_told_as_misuse() {
    let folder = Folder::new();
    let misused = |words: &str, said: &[&str]| folder.qkv(&format!("translate --model m {words}")).misused(said);
    misused("--beam 0 a", &["--beam <N>"]);
    misused("--beam 4 --greedy a", &["`--greedy` cannot be used with `--beam`"]);
    misused("--temperature 2 a", &["`--temperature` requires `--sample`"]);
    misused("--sample --top-p 1.5 a", &["--top-p <P>", "a number between 0 and 1"]);
    misused("--align=picture a", &["--align", "draw, pharaoh, none"]);
    misused("--input in.txt a", &["`TEXT` cannot be used with `--input`"]);
}
