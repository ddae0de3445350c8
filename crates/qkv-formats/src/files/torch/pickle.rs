//! The pickle of a checkpoint, interpreted without running it: values are in one list and refer to each other by index,
//! so that a value that contains itself does no harm. Names of functions stay names; see [`super`].

use super::super::cursor::Cursor;
use crate::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The largest number of values in a pickle, and the deepest nesting of dictionaries.
const MOST_VALUES: usize = 1 << 22;
const DEEPEST: usize = 16;

/// The type of stored numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Number {
    F64,
    F32,
    F16,
    Bf16,
    /// Integers and other types that weights do not have.
    Other(String),
}

impl Number {
    fn of(storage: &str) -> Number {
        match storage {
            "DoubleStorage" => Number::F64,
            "FloatStorage" => Number::F32,
            "HalfStorage" => Number::F16,
            "BFloat16Storage" => Number::Bf16,
            other => Number::Other(other.to_owned()),
        }
    }

    /// Its name in safetensors.
    pub fn name(&self) -> &str {
        match self {
            Number::F64 => "F64",
            Number::F32 => "F32",
            Number::F16 => "F16",
            Number::Bf16 => "BF16",
            Number::Other(name) => name,
        }
    }

    /// Bytes per number; 1 for types that are not read.
    pub fn bytes(&self) -> usize {
        match self {
            Number::F64 => 8,
            Number::F32 => 4,
            Number::F16 | Number::Bf16 => 2,
            Number::Other(_) => 1,
        }
    }
}

/// Where the values of a tensor are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredTensor {
    pub number: Number,
    /// The name of its file in the archive.
    pub key: String,
    /// Index of its first value.
    pub offset: usize,
    pub shape: Vec<usize>,
    /// Number of values from one index to the next, along each axis.
    pub strides: Vec<usize>,
}

/// The index of a value.
type At = usize;

/// A value.
#[derive(Clone, Debug)]
enum Value {
    /// Anything that is not interpreted.
    Opaque,
    Whole(i64),
    Text(String),
    /// A function or a class, by its name.
    Global(String),
    Tuple(Vec<At>),
    List(Vec<At>),
    Dict(Vec<(At, At)>),
    Storage(Number, String),
    Tensor(Box<StoredTensor>),
}

/// The stack machine that interprets a pickle.
struct Machine<'a> {
    code: Cursor<'a>,
    values: Vec<Value>,
    stack: Vec<At>,
    marks: Vec<usize>,
    memo: HashMap<u32, At>,
}

impl Machine<'_> {
    fn wrong(&self, what: impl Into<String>) -> Error {
        self.code.wrong(what)
    }

    fn push(&mut self, value: Value) -> Result<()> {
        if self.values.len() >= MOST_VALUES {
            return Err(self.wrong(format!("it has more than {MOST_VALUES} values")));
        }
        self.values.push(value);
        self.stack.push(self.values.len() - 1);
        Ok(())
    }

    fn pop(&mut self) -> Result<At> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => Ok(self.stack.pop().expect("it is not empty")),
            false => Err(self.wrong("it takes a value from an empty stack")),
        }
    }

    fn top(&self) -> Result<At> {
        self.stack.last().copied().ok_or_else(|| self.wrong("it needs a value where there is none"))
    }

    /// Pops everything above the last mark.
    fn marked(&mut self) -> Result<Vec<At>> {
        let mark = self.marks.pop().ok_or_else(|| self.wrong("a mark is missing"))?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn text(&mut self, length: u64) -> Result<()> {
        let text = String::from_utf8_lossy(self.code.take(length)?).into_owned();
        self.push(Value::Text(text))
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.code.bytes[self.code.at..];
        let end = rest.iter().position(|&byte| byte == b'\n').ok_or_else(|| self.wrong("a line does not end"))?;
        let line = String::from_utf8_lossy(self.code.take(end as u64)?).into_owned();
        self.code.take(1)?;
        Ok(line)
    }

    fn tuple(&mut self, count: usize) -> Result<()> {
        let mut items = (0..count).map(|_| self.pop()).collect::<Result<Vec<_>>>()?;
        items.reverse();
        self.push(Value::Tuple(items))
    }

    fn recall(&mut self, key: u32) -> Result<()> {
        let at = *self.memo.get(&key).ok_or_else(|| self.wrong(format!("it recalls {key}, which it never kept")))?;
        self.stack.push(at);
        Ok(())
    }

    fn keep(&mut self, key: u32) -> Result<()> {
        let at = self.top()?;
        self.memo.insert(key, at);
        Ok(())
    }

    /// Sets entries of the dictionary on top of the stack; drops them if the top is anything else.
    fn set(&mut self, items: &[At]) -> Result<()> {
        if !items.len().is_multiple_of(2) {
            return Err(self.wrong("a key has no value"));
        }
        let at = self.top()?;
        if let Value::Dict(entries) = &mut self.values[at] {
            entries.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1])));
        }
        Ok(())
    }

    fn append(&mut self, items: &[At]) -> Result<()> {
        let at = self.top()?;
        if let Value::List(list) = &mut self.values[at] {
            list.extend_from_slice(items);
        }
        Ok(())
    }

    fn whole(&self, at: At) -> Option<usize> {
        match self.values[at] {
            Value::Whole(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    fn wholes(&self, at: At) -> Option<Vec<usize>> {
        match &self.values[at] {
            Value::Tuple(items) | Value::List(items) => items.iter().map(|&at| self.whole(at)).collect(),
            _ => None,
        }
    }

    fn items(&self, at: At) -> &[At] {
        match &self.values[at] {
            Value::Tuple(items) => items,
            _ => &[],
        }
    }

    /// A storage: `("storage", type, key, location, length)`.
    fn storage(&mut self) -> Result<()> {
        let at = self.pop()?;
        let found = match self.items(at) {
            &[_, kind, key, ..] => match (&self.values[kind], &self.values[key]) {
                (Value::Global(kind), Value::Text(key)) => {
                    let kind = kind.rsplit('.').next().unwrap_or_default();
                    Value::Storage(Number::of(kind), key.clone())
                }
                _ => Value::Opaque,
            },
            _ => Value::Opaque,
        };
        self.push(found)
    }

    /// Pushes what a call would return if that is a tensor or an ordered dictionary; nothing is called.
    fn reduce(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let items = self.items(arguments);
        let name = match &self.values[function] {
            Value::Global(name) => name.as_str(),
            _ => "",
        };
        let found = match (name, items) {
            ("collections.OrderedDict", []) => Value::Dict(Vec::new()),
            ("torch._utils._rebuild_parameter", &[tensor, ..]) => self.values[tensor].clone(),
            ("torch._utils._rebuild_tensor_v2", &[storage, offset, shape, strides, ..]) => {
                let numbers = (self.whole(offset), self.wholes(shape), self.wholes(strides));
                match (&self.values[storage], numbers) {
                    (Value::Storage(number, key), (Some(offset), Some(shape), Some(strides))) => {
                        let (number, key) = (number.clone(), key.clone());
                        Value::Tensor(Box::new(StoredTensor { number, key, offset, shape, strides }))
                    }
                    _ => return Err(self.wrong("a tensor is described in another way than PyTorch does")),
                }
            }
            _ => Value::Opaque,
        };
        self.push(found)
    }

    /// Interprets one instruction; `true` at the end.
    fn follow(&mut self) -> Result<bool> {
        let instruction = self.code.u8()?;
        match instruction {
            b'.' => return Ok(true),
            0x80 => drop(self.code.u8()?),  // PROTO
            0x95 => drop(self.code.u64()?), // FRAME
            b'(' => self.marks.push(self.stack.len()),
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b']' => self.push(Value::List(Vec::new()))?,
            b')' => self.push(Value::Tuple(Vec::new()))?,
            b'N' | 0x88 | 0x89 | 0x8f => self.push(Value::Opaque)?, // None, True, False, an empty set
            b'K' => {
                let number = self.code.u8()?;
                self.push(Value::Whole(number.into()))?;
            }
            b'M' => {
                let number = self.code.u16()?;
                self.push(Value::Whole(number.into()))?;
            }
            b'J' => {
                let number = self.code.u32()? as i32;
                self.push(Value::Whole(number.into()))?;
            }
            0x8a => {
                let length = self.code.u8()?;
                let bytes = self.code.take(length.into())?;
                let mut eight = [if bytes.last().is_some_and(|&byte| byte > 127) { 255 } else { 0 }; 8];
                let fits = bytes.len() <= 8;
                eight.iter_mut().zip(bytes).for_each(|(to, &byte)| *to = byte);
                self.push(if fits { Value::Whole(i64::from_le_bytes(eight)) } else { Value::Opaque })?;
            }
            b'G' => {
                self.code.u64()?;
                self.push(Value::Opaque)?;
            }
            b'X' | b'T' => {
                let length = self.code.u32()?;
                self.text(length.into())?;
            }
            0x8c | b'U' => {
                let length = self.code.u8()?;
                self.text(length.into())?;
            }
            0x8d => {
                let length = self.code.u64()?;
                self.text(length)?;
            }
            b'B' => {
                let length = self.code.u32()?;
                self.code.take(length.into())?;
                self.push(Value::Opaque)?;
            }
            b'C' => {
                let length = self.code.u8()?;
                self.code.take(length.into())?;
                self.push(Value::Opaque)?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Value::Global(format!("{module}.{name}")))?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let found = match (&self.values[module], &self.values[name]) {
                    (Value::Text(module), Value::Text(name)) => Value::Global(format!("{module}.{name}")),
                    _ => Value::Opaque,
                };
                self.push(found)?;
            }
            b't' => {
                let items = self.marked()?;
                self.push(Value::Tuple(items))?;
            }
            0x85..=0x87 => self.tuple(usize::from(instruction - 0x84))?,
            b'q' => {
                let key = self.code.u8()?;
                self.keep(key.into())?;
            }
            b'r' => {
                let key = self.code.u32()?;
                self.keep(key)?;
            }
            0x94 => self.keep(self.memo.len() as u32)?,
            b'h' => {
                let key = self.code.u8()?;
                self.recall(key.into())?;
            }
            b'j' => {
                let key = self.code.u32()?;
                self.recall(key)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])?;
            }
            b'u' => {
                let items = self.marked()?;
                self.set(&items)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' => {
                let items = self.marked()?;
                self.append(&items)?;
            }
            0x90 => drop(self.marked()?), // ADDITEMS to a set
            b'Q' => self.storage()?,
            b'R' => self.reduce()?,
            0x81 => {
                self.pop()?;
                self.pop()?;
                self.push(Value::Opaque)?;
            }
            b'b' => drop(self.pop()?), // the state of an object
            b'0' => drop(self.pop()?),
            other => return Err(self.wrong(format!("instruction {other:#04x} is not one that checkpoints have"))),
        }
        Ok(false)
    }
}

/// The tensors of a pickle, with their names.
pub(super) fn tensors(code: &[u8], path: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    let mut code = Cursor::new(code, path);
    code.part = "data.pkl".into();
    let mut machine = Machine { code, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
    while !machine.follow()? {}
    let mut found = BTreeMap::new();
    let mut visits = 0;
    let mut rest = vec![(String::new(), machine.top()?, 0)];
    while let Some((name, at, depth)) = rest.pop() {
        visits += 1;
        if visits > MOST_VALUES {
            return Err(machine.wrong("its dictionaries hold each other"));
        }
        match &machine.values[at] {
            Value::Tensor(tensor) => drop(found.insert(name, (**tensor).clone())),
            Value::Dict(entries) if depth < DEEPEST => {
                for &(key, value) in entries {
                    let key = match &machine.values[key] {
                        Value::Text(text) => text.clone(),
                        Value::Whole(number) => number.to_string(),
                        _ => continue,
                    };
                    let name = if name.is_empty() { key } else { format!("{name}.{key}") };
                    rest.push((name, value, depth + 1));
                }
            }
            _ => {}
        }
    }
    Ok(found)
}
