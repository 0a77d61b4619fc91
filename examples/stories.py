"""Two short stories for the demo, long enough that reading them takes a small model a noticeable time."""

LIGHTHOUSE = """\
The lighthouse on Gull Rock had stood empty for eleven years when Mara moved in. She brought a wooden chest, a \
box of tools and her grey dog, whose name was Biscuit. The villagers across the bay said that nobody could \
live out there in winter. The wind came straight from the north, they said, and the stairs were rotten, and \
the lamp had not been lit since old Tom had died. Mara listened politely, bought a bag of flour and two bags \
of coal, and rowed back to the rock.

The first thing she repaired was the stairs. There were ninety-four steps, and every third one had to be \
replaced. She cut the planks from a fishing boat that had been wrecked on the shore the year before. It took \
her three weeks. Every evening she sat at the window with a cup of tea, and Biscuit lay on her feet and \
snored, and the waves broke against the stones below. She did not feel lonely. She had worked in a noisy \
harbour office for half of her life, and silence was what she had come for.

The second thing was the lamp. It was a huge thing of brass and glass, taller than she was, and covered with \
dust and the droppings of birds. She cleaned every piece of it with vinegar and newspaper. When she was done, \
the glass shone so brightly in the sun that children on the other side of the bay came down to the beach to \
look at it. But the lamp would not burn. A small wheel that pumped the oil was missing, and without it there \
was no light. Mara wrote to the maker of the lamp, a company in Glasgow. The answer came a month later: the \
company was sorry, it had stopped making such wheels in the year 1931.

So she began to make the wheel herself. She made the first one of wood, and it burned. She made the second one \
of tin, and it bent. The third one was cut from the bottom of a copper kettle, and that one turned. On the \
last evening of November she climbed the ninety-four steps with a can of oil and a box of matches. Biscuit \
went with her, one step behind, as always. She filled the tank, turned the little copper wheel three times, \
and held a match to the wick.

At first nothing happened. Then a yellow flame stood up behind the glass, and the whole room was full of \
light. It reached over the water, over the boats and the beach, as far as the white church on the hill. In the \
village, doors opened. Somebody rang the church bell, although it was not Sunday.

Two weeks later a storm came, the worst in twenty years. A fishing boat called the Silver Annie was still out, \
with four men on board. They could see neither the shore nor the rocks. The captain, a man named Peter, said \
later that he had already said goodbye to the world when he saw a yellow light, low in the north, that should \
not have been there. He steered by it, and an hour after midnight the Silver Annie came into the harbour with \
a broken mast and four living men.

On the next morning eleven boats rowed out to Gull Rock. The villagers brought bread, smoked fish, a blanket, \
and a new copper kettle. And since that day nobody in the village has said that one can't live on Gull Rock in \
winter.
"""

CLOCKMAKER = """\
In the old town of Linden, between the bakery and the bridge, there was a shop where a clockmaker worked. His \
name was Emil, he was seventy-two years old, and he had never once been late. In his window hung forty clocks, \
and all of them showed the same time to the second. People set their watches by his window when they went to \
the station. When the trains were wrong, they said, Emil was right.

Emil had a granddaughter called Sophie, who came every Wednesday after school. She was nine. She was allowed \
to oil the small clocks, but not the large ones, and she was never allowed to touch the tall black clock that \
stood at the back of the shop behind a curtain. That clock had no hands. Sophie asked about it every week, and \
every week Emil answered: when you are older. She thought about the clock in the evenings, in bed, and made up \
stories about it. In one of them a king lived inside. In another it counted the days until the end of the \
world.

One Wednesday in March Emil was not in the shop. The door was open, the kettle was still warm, and on the \
table lay a note: I am at the doctor, back at five, please mind the shop. It was half past three. Sophie put \
on the blue apron, which was much too long for her, and sat behind the counter. Nobody came. It rained, and \
forty clocks ticked. At four o'clock she got up, went to the back of the shop and pulled the curtain aside.

The tall black clock was not locked. She opened its door. There was no king inside. There was a pendulum, a \
heavy brass weight, and on the back of the door there was a list of names with a date behind each of them. The \
list was written in many different hands. The first name was Johann, and the date was 1788. The last one was \
Emil, with a date from fifty years ago. Below it there was room for one more.

When Emil came back at five, wet from the rain, he saw the open curtain and was not angry. He sat down on the \
stool and dried his glasses. Every clockmaker of this shop, he said, has written his name there on the day \
when he finished his first clock. The tall one has no hands because it does not show the time of the day. It \
shows whose time it is. Then he gave Sophie a small box. In it were a spring, nine wheels, two hands and a \
face that was no larger than a coin.

It took her until the summer. The first time she put the wheels together, the clock ran backwards. The second \
time it ran twice too fast. The third time it stood still, and she cried a little and went home without saying \
goodbye. But on the next Wednesday she came back, and Emil had made cocoa, and together they found that one of \
the nine wheels had been put in upside down. On the twelfth of July, at exactly four in the afternoon, the \
smallest clock in the shop began to tick. It was as large as a walnut, and it was right to the second.

Emil took the good pen out of the drawer. Sophie wrote her name on the inside of the black door, below his, in \
large round letters. Then they hung the little clock in the window, between the forty others. It is still \
there, and people who walk past to the station say that it is the only one they trust more than Emil himself.
"""
