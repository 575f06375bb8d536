//! What these tests leave out in a run of all tests (`./run test`), which has more to do: they run
//! a part that depends on the sample of the run. By themselves they run everything.

/// The sample of the run: `./run test` sets it, as a hexadecimal number.
const SAMPLE_ENV: &str = "WINDROSE_SAMPLE";

/// The number of the sample; `None` means everything.
pub(crate) fn number() -> Option<usize> {
    let number = std::env::var(SAMPLE_ENV).ok()?;
    Some(usize::from_str_radix(&number, 16).expect("a hexadecimal number"))
}

/// Of the items, one of `parts` equal parts, or all.
pub(crate) fn part_of<T>(items: impl IntoIterator<Item = T>, parts: usize) -> Vec<T> {
    let chosen = |index: usize| number().is_none_or(|number| index % parts == number % parts);
    let items = items.into_iter().enumerate();
    items.filter(|(index, _)| chosen(*index)).map(|(_, item)| item).collect()
}
