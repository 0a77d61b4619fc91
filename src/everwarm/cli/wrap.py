"""Text that comes in pieces, wrapped at word borders as it is printed."""

from collections.abc import Callable

from rich.cells import cell_len

MOST_HELD = 24
"""Columns of a word that are held back until it ends: a longer one is a link or a name, and is printed as it comes."""


class Wrapper:
    """Breaks lines between words so that they fit into `width` columns. With a width of 0 nothing is changed."""

    def __init__(self, write: Callable[[str], object], width: int) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._spaces = ""  # seen and not printed yet: a break may take their place
        self._word = ""  # likewise

    def push(self, text: str) -> None:
        """Print what can be printed; the end of a word may have to wait for its rest."""
        if not self._width:
            self._write(text)
            return
        for letter in text:
            wide = cell_len(letter) > 1  # Chinese and Japanese may be broken between any two characters
            if letter in "\n \t" or wide:
                self._print_word()
            if letter == "\n":
                self._write("\n")
                self._column, self._spaces = 0, ""
            elif letter in " \t":
                self._spaces += letter
            else:
                self._word += letter
                if wide or cell_len(self._word) > MOST_HELD:
                    self._print_word()

    def flush(self) -> None:
        """The text is over."""
        if self._width:
            self._print_word()
        self._column, self._spaces = 0, ""

    def _print_word(self) -> None:
        if not self._word:
            return
        needed = cell_len(self._spaces) + cell_len(self._word)
        if self._column and self._column + needed > self._width:
            self._write("\n" + self._word)
            self._column = cell_len(self._word)
        else:
            self._write(self._spaces + self._word)
            self._column += needed
        self._word = self._spaces = ""
