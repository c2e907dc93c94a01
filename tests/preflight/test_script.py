"""What is read of a script."""

from eyas.preflight.script import Script


def test_uses_are_read_with_their_scope(tmp_path):
    text = "import a.b\nimport c as d\nfrom e import f as g\n\n"
    text += "def h():\n    from i import j\n    return j(1), d.k.l, g.m(x=1)\na.b.n\n"
    (tmp_path / "s.py").write_text(text)
    found = [(u.line, u.name, u.kind, u.where.function) for u in Script(tmp_path / "s.py").uses]
    assert found == [
        (1, "a.b", "import", ""),
        (2, "c", "import", ""),
        (3, "e.f", "from", ""),
        (6, "i.j", "from", "h"),
        (7, "i.j", "attribute", "h"),
        (7, "c.k.l", "attribute", "h"),
        (7, "e.f.m", "attribute", "h"),
        (8, "a.b.n", "attribute", ""),
    ]
